# SPDX-License-Identifier: Apache-2.0
"""Doxygen's input filter: turns the headers' plain comments into documentation comments. usage: comments.py FILE"""

import pathlib
import re
import sys

for line in pathlib.Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
    if re.match(r"\s*//(?!/)(?! -{3})", line):
        line = line.replace("//", "///", 1)
    else:  # after a member
        line = re.sub(r"([;,{}]\s*)//(?!/) ", r"\1///< ", line, count=1)
    print(line)
