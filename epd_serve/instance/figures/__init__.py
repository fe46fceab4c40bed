"""What an instance measures and tells of itself."""
