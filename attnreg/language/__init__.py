"""The words of a registry and its one condition grammar, evaluated."""
