"""What stages cost, alone and beside each other."""
