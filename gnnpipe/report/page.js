"use strict";
// Shows data-tip of the element under the pointer; the slider changes the width of the timeline.
const tip = document.getElementById("tip");
function show(event) {
  const found = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
  tip.hidden = !found;
  if (!found) return;
  tip.textContent = found.dataset.tip;
  const room = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - room.width - 4)) + "px";
  const below = event.clientY + 14;
  const top = below + room.height > innerHeight ? event.clientY - room.height - 10 : below;
  tip.style.top = Math.max(4, top) + "px";
}
document.addEventListener("pointermove", show);
document.addEventListener("pointerdown", show);
document.addEventListener("scroll", () => { tip.hidden = true; }, true);
const wide = document.getElementById("wide");
if (wide) wide.addEventListener("input", () => {
  document.getElementById("gantt").style.width = wide.value * 100 + "%";
});
