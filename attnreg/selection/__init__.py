"""One request -> one backend, with the reason for every verdict. Pure: no file, environment, clock or device."""
