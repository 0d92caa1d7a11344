"""Makes configurations of vLLM without starting an engine: `python -m tests.vllm.configure CASES.json RESULTS.json`.

A case is {"engine": engine arguments, "environment": variables}; its result is the message of the error, or null.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    results = []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        os.environ.update(case.get("environment", {}))
        arguments = case["engine"]
        if "kv_transfer_config" in arguments:
            arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
        try:
            EngineArgs(**arguments).create_engine_config()
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
        else:
            results.append(None)
        for name in case.get("environment", {}):
            del os.environ[name]
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
