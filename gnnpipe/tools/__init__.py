"""Commands that check the machine."""
