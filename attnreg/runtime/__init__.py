"""What an engine calls: the contract with kernel modules, the layer, the custom ops, the proofs of claims."""
