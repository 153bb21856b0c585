"""A small server that speaks the protocols of NeMo Gym's resource servers, for the tests of the client."""

import json
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: Sessions by cookie: a sum.
SESSIONS = {}


class Refused(Exception):
    """A status and a text."""


class Peers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"null")
        self.cookie = None
        try:
            status, answer = 200, getattr(self, "on_" + self.path.strip("/").replace("/", "_"))(body)
        except Refused as refused:
            status, answer = refused.args
        except AttributeError:
            status, answer = 404, {"detail": "no such route"}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if self.cookie:
            self.send_header("set-cookie", f"session={self.cookie}; Path=/; HttpOnly")
        self.end_headers()
        self.wfile.write(data)

    # Add numbers with a tool; the verifier compares the answer and the sum.

    def session(self):
        cookie = (self.headers.get("cookie") or "").partition("session=")[2]
        if cookie not in SESSIONS:
            raise Refused(403, {"detail": "no session"})
        return cookie

    def on_seed_session(self, body):
        self.cookie = secrets.token_hex(8)
        SESSIONS[self.cookie] = 0
        return {}

    def on_add(self, body):
        if not isinstance(body.get("number"), int):
            raise Refused(422, {"detail": "number: an integer is needed"})
        SESSIONS[self.session()] += body["number"]
        return {"sum": SESSIONS[self.session()]}

    def on_verify(self, body):
        total = SESSIONS.pop(self.session())
        output = body["response"]["output"]
        said = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
        calls = [item for item in output if item["type"] == "function_call"]
        right = total == body["expected"] and bool(said) and said[-1] == str(total)
        return {**body, "reward": float(right), "calls": len(calls)}


    # A GymnasiumServer, below /gym: add numbers until the sum is right; each number that is added earns a tenth.

    def on_gym_reset(self, body):
        self.cookie = secrets.token_hex(8)
        SESSIONS[self.cookie] = 0
        return {"observation": "The sum is 0.", "info": {"supports_explicit_close": True}}

    def on_gym_step(self, body):
        cookie, output = self.session(), body["response"]["output"]
        calls = [item for item in output if item["type"] == "function_call"]
        for call in calls:
            SESSIONS[cookie] += json.loads(call["arguments"])["number"]
        total = SESSIONS[cookie]
        outputs = [{"call_id": call["call_id"], "output": f"sum {total}"} for call in calls]
        done = total == body["expected"]
        said = None if done else f"The sum is {total}."
        info = {"tool_outputs": outputs, "adds": len(calls)}
        return {"observation": said, "reward": len(calls) / 10, "terminated": done, "truncated": False, "info": info}

    def on_gym_close(self, body):
        del SESSIONS[self.session()]
        return {}


# Connections that wait to be accepted: episodes open more at once than the default of 5.
ThreadingHTTPServer.request_queue_size = 128
server = ThreadingHTTPServer(("127.0.0.1", 0), Peers)
print(f"listens on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
