"""Games of OpenSpiel: two or more players, chance, hidden cards. The model plays one side against a fixed opponent.

Chance and the opponent draw from the task's seed, so that equal moves lead to equal games. Sides alternate from task to task.
"""

from sinew import Done, Env, ToolError, tool
from sinew.bridges import chosen, draw, package, seeds


class Spiel(Env):
    #: The game with its parameters, as in `pyspiel.load_game`.
    game = "tic_tac_toe"
    #: How the other players move: `random`, `first` (the first legal move), or `search` (looks `depth` moves ahead).
    opponent = "random"
    depth = 2
    train, held_out = 1000, 100

    @classmethod
    def setup_worker(cls):
        cls.pyspiel = package("pyspiel", "open-spiel==2.0.2")
        cls.rules = cls.pyspiel.load_game(cls.game)
        if cls.opponent not in ("random", "first", "search"):
            raise ValueError(f"opponent is {cls.opponent!r}; allowed: random, first, search")
        if cls.rules.get_type().dynamics != cls.pyspiel.GameType.Dynamics.SEQUENTIAL:
            raise ValueError(f"{cls.game}: players move at once; games with turns are played here")

    @property
    def system(self):
        return f"You play {self.rules.get_type().long_name}, as player {self.side}. Choose one of the legal moves each turn."

    def start(self, task):
        self.side, self.seed = task.side, task.seed
        self.board, self.moves = self.rules.new_initial_state(), 0
        self.others()
        return self.shown()

    def draw(self):
        return draw(self.seed, len(self.board.full_history()))

    def others(self):
        """Chance and the other players, until the model is to move or the game is over."""
        while not self.board.is_terminal() and self.board.current_player() != self.side:
            if self.board.is_chance_node():
                outcomes = self.board.chance_outcomes()
                moves, weights = zip(*outcomes)
                self.board.apply_action(self.draw().choices(moves, weights)[0])
            else:
                self.board.apply_action(self.reply())

    def reply(self):
        legal = self.board.legal_actions()
        if self.opponent == "first":
            return legal[0]
        if self.opponent == "search" and self.rules.get_type().chance_mode == self.pyspiel.GameType.ChanceMode.DETERMINISTIC:
            me = self.board.current_player()
            worths = [(self.worth(self.board.child(move), me, self.depth - 1), move) for move in legal]
            best = max(worth for worth, _ in worths)
            legal = [move for worth, move in worths if worth == best]
        return self.draw().choice(legal)

    def worth(self, board, player, depth):
        if board.is_terminal():
            return board.player_return(player)
        if depth <= 0:
            return 0.0
        worths = [self.worth(board.child(move), player, depth - 1) for move in board.legal_actions()]
        return max(worths) if board.current_player() == player else min(worths)

    def legal(self):
        return {self.board.action_to_string(self.side, move): move for move in self.board.legal_actions()}

    def shown(self):
        if self.board.is_terminal():
            return f"{self.seen()}\nThe end."
        return f"{self.seen()}\nLegal moves: {', '.join(self.legal())}"

    def seen(self):
        """What this side knows."""
        kind = self.rules.get_type()
        if kind.short_name == "kuhn_poker":
            return self.kuhn()
        if kind.information == self.pyspiel.GameType.Information.PERFECT_INFORMATION:
            return str(self.board)
        if kind.provides_information_state_string:
            return f"What you know: {self.board.information_state_string(self.side)}"
        return f"What you see: {self.board.observation_string(self.side)}"

    def kuhn(self):
        """Kuhn poker in words: the package says a card, and a letter for each move."""
        text = self.board.information_state_string(self.side)
        moves = [{"p": "pass", "b": "bet"}[letter] for letter in text[1:]]
        rules = f"Cards are 0 to {self.rules.num_players()}, one for each player, and the highest wins. All players put 1 into the pot; a bet adds 1."
        return f"{rules}\nYou hold {text[:1]}. Moves so far: {', '.join(moves) or 'none'}."

    def one(self, text):
        if self.board.is_terminal():
            raise ToolError("the game is over")
        legal = self.legal()
        name = text.strip() if text.strip() in legal else chosen(text, legal)
        if name is None:
            raise ToolError(f"{text[:80]!r} is no legal move; legal: {', '.join(legal)}")
        self.board.apply_action(legal[name])
        self.moves += 1
        self.others()
        return Done(self.shown()) if self.board.is_terminal() else self.shown()

    @tool
    def play(self, move: str):
        "Make one of the legal moves."
        return self.one(move)

    def step(self, text):
        return self.one(text)

    def reward(self):
        """The result on the scale of the game: 0 for the worst, 1 for the best. A game that is not over is lost."""
        low, high = self.rules.min_utility(), self.rules.max_utility()
        value = self.board.player_return(self.side) if self.board.is_terminal() else low
        return {"reward": (value - low) / (high - low), "success": value > 0, "result": value, "moves": self.moves}

    def state(self):
        return [self.side, self.board.history()]

    def snapshot(self):
        return {"side": self.side, "seed": self.seed, "moves": self.moves, "history": self.board.history()}

    def restore(self, snapshot):
        self.side, self.seed, self.moves = snapshot["side"], snapshot["seed"], snapshot["moves"]
        self.board = self.rules.new_initial_state()
        for move in snapshot["history"]:
            self.board.apply_action(move)

    @classmethod
    def tasks(cls, split, seed):
        players = cls.rules.num_players()
        for i, number in enumerate(seeds(split, seed, cls.train, cls.held_out)):
            side = i % players
            yield {"prompt": f"Game {number}.", "kind": f"player {side}", "seed": number, "side": side}
