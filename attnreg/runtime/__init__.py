"""The interface for engines: the contract with kernel modules, the layer that runs one, and the custom ops."""
