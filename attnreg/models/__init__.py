"""A config.json -> what each layer of the model asks for."""
