"""The C extension.  Everything else about the package is in pyproject.toml.

Two variables of the environment choose the build:

    LOGSTORE_BUILD=release|debug|asan|tsan    a row of BUILDS below; release when unset
    LOGSTORE_WERROR=1                         a compiler warning fails the build (CI)
"""

import os
import sys
from glob import glob

from setuptools import Extension, setup

WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion"]
COMMON = ["-std=c11", "-fvisibility=hidden", *WARNINGS]

# Debian and others predefine _FORTIFY_SOURCE: undefine it first, or every file warns.
HARDENED = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
RELRO = ["-Wl,-z,relro", "-Wl,-z,now"] if sys.platform.startswith("linux") else []

# -UNDEBUG: Python's own flags switch asserts off; the builds meant for finding faults want them.
# The sanitizers intercept what _FORTIFY_SOURCE rewrites, so those rows go without it.
CHECKED = ["-g", "-fno-omit-frame-pointer", "-UNDEBUG", "-U_FORTIFY_SOURCE"]
ASAN = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
TSAN = ["-fsanitize=thread"]

BUILDS = {
    "release": {"compile": ["-O3", *HARDENED], "link": RELRO},
    "debug": {"compile": ["-O0", *CHECKED], "link": []},
    "asan": {"compile": ["-O1", *CHECKED, *ASAN], "link": ASAN},
    "tsan": {"compile": ["-O1", *CHECKED, *TSAN], "link": TSAN},
}


def chosen_build() -> dict[str, list[str]]:
    name = os.environ.get("LOGSTORE_BUILD", "release")
    if name not in BUILDS:
        sys.exit(f"LOGSTORE_BUILD must be one of {', '.join(BUILDS)}, not {name!r}")
    return BUILDS[name]


build = chosen_build()
werror = ["-Werror"] if os.environ.get("LOGSTORE_WERROR") == "1" else []

setup(
    ext_modules=[
        Extension(
            "logstore._native",
            sources=sorted(glob("native/core/*.c") + glob("native/python/*.c")),
            depends=sorted(glob("native/core/*.h") + glob("native/python/*.h")),
            include_dirs=["native/core", "native/python"],
            extra_compile_args=[*COMMON, *build["compile"], *werror],
            extra_link_args=["-pthread", *build["link"]],
        )
    ]
)
