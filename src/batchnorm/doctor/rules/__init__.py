"""One rule a file; its docstring is its page. `batchnorm.doctor.codes` is the table."""
