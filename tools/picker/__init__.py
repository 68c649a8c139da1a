"""The picker: `attnreg explain` in a browser. Registries and models as data, and the pages that evaluate them."""
