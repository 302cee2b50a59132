"""What runs: mesh, mailbox, exchange, histories, stage and the executor of programs."""
