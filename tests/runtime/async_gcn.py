"""The built-in GCN as stages of ``async_reference``, op by op in plain torch."""

import scipy.sparse as sp
import torch.nn.functional as F
from async_reference import RefStage


def ops_of(layers, features_are_given):
    """Ops in order: A aggregates, R is the rest of a layer; G gives aggregated features.

    ``features_are_given``: they are aggregated once. If a product makes features narrower it comes
    first, as P, and N or B is the rest without it. The last layer has no norm.
    """
    last = layers - 1
    inner = [(kind, i) for i in range(1, last) for kind in "AR"]
    first = [(kind, 0) for kind in ("GR" if features_are_given else "PAN")]
    return [*first, *inner, ("A", last), ("P", last), ("B", last)]


def stage(ops, dropped, loss_of, is_end):
    """Function of a stage of these ops; it passes on x, or ``loss_of(logits, pass)``.

    ``dropped(x, pass, site)``: rows behind the dropout of a site.
    """

    def function(values, weights, one):
        x = values["x"] if values else one.chunk.data["x"]
        for kind, i in ops:
            conv, norm = f"convs.{i}.", f"norms.{i}."
            if kind == "A":
                x = one.aggregate("gcn", str(i), x)
            elif kind == "G":
                x = one.chunk.data["aggregated"]
            elif kind == "P":
                x = F.linear(x, weights[conv + "lin.weight"])
            elif kind == "B":
                x = x + weights[conv + "bias"]
            else:
                x = F.linear(x, weights[conv + "lin.weight"]) if kind == "R" else x
                x = x + weights[conv + "bias"]
                scale, shift = weights[norm + "weight"], weights[norm + "bias"]
                x = dropped(F.layer_norm(x, scale.shape, scale, shift).relu(), one, i)
        return {"loss": loss_of(x, one)} if is_end else {"x": x}

    return function


def stages_of(prepared, dropped, loss_of):
    """The stages of a prepared run of the built-in GCN, with copies of its weights."""
    config = prepared.config
    x = prepared.graph.x
    ops = ops_of(config.layers, not sp.issparse(x) or x.shape[1] <= config.hidden)
    assert prepared.plan.num_ops == len(ops)
    found = []
    for number, planned in enumerate(prepared.plan.stages):
        module = prepared.model.stage_module(planned.ops)
        weights = {name: p.detach().clone() for name, p in module.named_parameters()}
        is_end = number == prepared.plan.num_stages - 1
        function = stage([ops[i] for i in planned.ops], dropped, loss_of, is_end)
        found.append(RefStage(function, weights, {"x": number - 1} if number else {}))
    return found
