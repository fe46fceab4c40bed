"""The admin API for operators, the launcher and autoscale."""
