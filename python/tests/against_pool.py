"""Random walks of the tiny world, played here and pushed: SINEW_URL, SINEW_TOKEN, how many groups, and a prefix of their ids."""

import os
import sys
from pathlib import Path

from sinew import ApiError, pool

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from walks import TOKENS, walks as made_walks  # noqa: E402


def main():
    walks = made_walks(int(sys.argv[1]), *sys.argv[2:3])
    tokenizer = pool.tokenizer_hash(TOKENS)
    with pool.Pool(os.environ["SINEW_URL"], os.environ["SINEW_TOKEN"]) as target:
        assert target.status()["tokenizer"] == tokenizer
        told = target.push(walks, tokenizer=tokenizer, source="walks")
        assert all(t.status == "admitted" for t in told), told
        again = target.push(walks[:4], tokenizer=tokenizer, source="walks")
        assert [t.status for t in again] == ["duplicate"] * 4
        wrong = dict(walks[0], id="wrong", nodes=[walks[0]["nodes"][0], dict(walks[0]["nodes"][1], logprobs=[1.0, 0.0])])
        [held] = target.push([wrong], tokenizer=tokenizer, source="walks")
        assert (held.status, held.code) == ("quarantined", "logprob_value"), held
        [row] = target.quarantined(page=1)
        assert (row.id, row.source, row.item["id"]) == (held.quarantine, "walks", "wrong")
        assert target.release(row.id).code == "logprob_value"
        target.delete(row.id)
        assert list(target.quarantined()) == []
        try:
            target.delete(row.id)
        except ApiError as e:
            assert e.status == 404
        else:
            raise AssertionError("deleted twice")
    with pool.Pool(os.environ["SINEW_URL"], "another-token") as stranger:
        try:
            stranger.push(walks[:1], tokenizer=tokenizer)
        except ApiError as e:
            assert e.status == 401
        else:
            raise AssertionError("a stranger pushed")
    print("ok", len(walks))


main()
