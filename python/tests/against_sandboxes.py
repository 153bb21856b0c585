"""The client against a real server of sandboxes: SINEW_URL, SINEW_TOKEN."""

import os
import traceback

from sinew import ApiError, Sandboxes, SinewError

with Sandboxes(os.environ["SINEW_URL"], os.environ["SINEW_TOKEN"]) as sandboxes:
    assert sandboxes.levels()[0]["level"] == "process"
    with sandboxes.create(env={"COLOUR": "blue"}, lease_s=60) as sandbox:
        done = sandbox.python("import os; print(6 * 7, os.environ['COLOUR'])")
        assert done.ok and done.text == "42 blue\n", done
        done = sandbox.run(["/bin/cat"], stdin=b"\x00\xff")
        assert done.stdout == b"\x00\xff", done
        done = sandbox.shell("echo bad >&2; exit 3")
        assert (done.ok, done.code, done.stderr) == (False, 3, b"bad\n"), done
        done = sandbox.python("while True: pass", timeout_s=1)
        assert done.ending == "timeout" and done.code is None, done
        sandbox.write("a folder/x.txt", "kept")
        assert sandbox.read("a folder/x.txt") == b"kept"
        first, second = sandbox.fork(2)
        assert [s.id for s in sandboxes.list()].count(first.id) == 1
        with first, second:
            first.write("a folder/x.txt", "changed")
            assert second.read("a folder/x.txt") == b"kept"
        with sandboxes.create(snapshot=sandbox.snapshot()) as again:
            assert again.shell("cat 'a folder/x.txt'").text == "kept"
        assert sandbox.stats()["file_bytes"] > 0
        sandbox.reset()
        for wrong in (lambda: sandbox.read("a folder/x.txt"), lambda: sandbox.read("../etc/passwd")):
            try:
                wrong()
            except ApiError as e:
                assert e.status in (400, 404, 422), e
            else:
                raise AssertionError("a file that is not there was read")
    try:
        sandbox.python("1")
    except ApiError as e:
        assert e.status in (404, 410), e
    try:
        sandboxes.create().write("/etc/passwd", b"")
    except SinewError as e:
        assert "relative" in str(e)
url, token = os.environ["SINEW_URL"], os.environ["SINEW_TOKEN"]
# As it comes out of a file.
with Sandboxes(url, token + "\n") as sandboxes:
    sandboxes.levels()
# A secret is in no error, also in none of those that are under it.
for address, key in ((url.replace("//", "//me:hunter2@"), token), (url, "hunter2\nx"), (url, "")):
    try:
        Sandboxes(address, key).levels()
    except SinewError:
        assert "hunter2" not in traceback.format_exc()
    else:
        raise AssertionError(f"{address!r} and {key!r} were taken")
print("ok")
