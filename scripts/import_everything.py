"""Import every module of the package; exit code 1 if one fails for another reason than an optional package.

The machine that has a card may lack what others bring: jsonargparse, bitsandbytes, datasets, pyarrow and more.
"""

import importlib
import pkgutil
import sys
import warnings

import lightning_memkit

# What a module may need that is no dependency of the package, or is missing in the images of rented machines.
OPTIONAL = {
    "bitsandbytes", "cut_cross_entropy", "datasets", "docstring_parser", "flash_attn", "jsonargparse", "liger_kernel",
    "peft", "pyarrow", "torchao", "transformers", "triton", "typeshed_client",
}  # fmt: skip


def main() -> int:
    """Print each module that does not import, and how many do; arguments name packages to be hidden."""
    warnings.simplefilter("ignore")
    sys.modules.update(dict.fromkeys(sys.argv[1:]))  # type: ignore[arg-type]
    imported, lacking, failed = 0, [], []
    for found in pkgutil.walk_packages(
        lightning_memkit.__path__, "lightning_memkit.", onerror=lambda name: None
    ):
        try:
            importlib.import_module(found.name)
            imported += 1
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            (lacking if package in OPTIONAL else failed).append(f"{found.name}: {error}")
        except Exception as error:
            failed.append(f"{found.name}: {type(error).__name__}: {error}")
    for line in (*lacking, *failed):
        print(line)
    print(f"{imported} modules imported, {len(lacking)} lack an optional package, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
