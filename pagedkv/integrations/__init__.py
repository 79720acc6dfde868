"""PagedKV inside other people's engines. Each module needs the package that it is named after."""
