"""One command a table: `python -m benchmarks` lists them, `python -m benchmarks NAME` runs one."""
