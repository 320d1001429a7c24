"""What every room may use: errors, patching, forks, progress, random states, answers kept from run to run."""
