"""The version of the contract between an engine and a kernel module, and the functions of such a module.

`attnreg.runtime.interface` is the contract. What is here can be read without torch.
"""

# A change after which a module that was correct could compute something else, or fail, counts it up.
CONTRACT = 1
FUNCTIONS = ("kv_cache_shape", "plan", "write_kv", "forward")
