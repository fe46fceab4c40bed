"""What stages cost, alone and beside each other, and what moving bytes between them costs."""
