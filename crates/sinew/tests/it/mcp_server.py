"""An MCP server with one tool, which gives the word of the day, over standard input and output."""

import json
import sys

TOOL = {"name": "quince_lookup", "description": "Gives the word of the day.", "inputSchema": {"type": "object", "properties": {}}}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    version = asked.get("params", {}).get("protocolVersion")
    results = {
        "initialize": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "words", "version": "1"}},
        "tools/list": {"tools": [TOOL]},
        "tools/call": {"content": [{"type": "text", "text": "quince"}]},
        "ping": {},
    }
    known = asked["method"] in results
    end = {"result": results[asked["method"]]} if known else {"error": {"code": -32601, "message": "unknown method"}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"]} | end), flush=True)
