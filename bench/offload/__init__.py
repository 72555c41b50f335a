"""What the optimizer on the CPU costs, for weights and states that do not lie on the card."""
