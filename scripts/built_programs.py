#!/usr/bin/env python3
"""Reads Cargo's messages (--message-format json-render-diagnostics) and prints the programs that it built, one a line:
the package's folder, the kind of target (test, bin, example), the target's name and the program, with tabs between."""
import json
import os
import sys

for line in sys.stdin:
    message = json.loads(line)
    if message["reason"] == "compiler-artifact" and message["executable"]:
        folder = os.path.basename(os.path.dirname(message["manifest_path"]))
        print(folder, message["target"]["kind"][0], message["target"]["name"], message["executable"], sep="\t")
