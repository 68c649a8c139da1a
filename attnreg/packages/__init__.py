"""Other packages: what is installed, what pins which versions, and with which versions backends were proven."""
