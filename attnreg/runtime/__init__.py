"""What an engine calls: the contract with kernel modules, the layer that runs one, the custom ops."""
