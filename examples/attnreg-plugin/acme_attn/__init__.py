"""ACME_ATTN, a backend of a third party for attnreg. attnreg finds attnreg.yaml without an import."""
