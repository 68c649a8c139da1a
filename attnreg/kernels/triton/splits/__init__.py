"""Keys that programs share out: which each walks, the parts that they make, and the merge of these."""
