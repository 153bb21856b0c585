"""Customer service with a database, a policy and a simulated customer: cancel, change, return and refund orders.

The database is SQLite in memory, made from a seed. What counts is its state at the end, compared with the state that the policy allows,
and what the customer was told when the policy forbids the wish. The customer answers questions from a script, and never gives
what was not asked for.
"""

import hashlib
import json
import random
import re
import sqlite3

from sinew import Done, Env, ToolError, tool

NAMES = (
    "Ada Bea Carl Dana Emil Fay Gus Hana Ivo Jana Karl Lena Milo Nora Otto Pia Rosa Sven Tilda Uwe".split()
)
GOODS = {"lamp": 40, "chair": 85, "kettle": 30, "desk": 150, "mug": 9, "rug": 60, "shelf": 75, "clock": 25}
COLOURS = ["black", "blue", "green", "red", "white"]
#: Days within which a delivered order can be returned.
RETURN_DAYS = 30

POLICY = f"""You serve customers of a shop. Rules:
1. Ask for the e-mail address, and look the customer up with it before anything else. Other people's orders stay secret.
2. A pending order can be cancelled, and its address or the colour of its item changed. A shipped or delivered one cannot.
3. A delivered order can be returned within {RETURN_DAYS} days after its delivery. The money goes back the way that it was paid.
4. If the rules forbid what is asked, refuse with the tool `refuse` and change nothing.
5. When all is done, call `finish`."""


class Retail(Env):
    system = POLICY
    #: Calls and messages until the customer leaves.
    limit = 30

    def start(self, task):
        self.task = {"world": task.world, "wish": task.wish}
        self.db = self.shop(task.world)
        self.s = {"used": 0, "known": None, "refused": False, "finished": False}
        return None

    @classmethod
    def shop(cls, world):
        draw = random.Random(world)
        db = sqlite3.connect(":memory:", check_same_thread=False)
        db.execute("create table customers(email text primary key, name text, paid_with text)")
        db.execute(
            "create table orders(id text primary key, email text, item text, colour text, price int, status text, delivered_days_ago int, address text, refund text)"
        )
        for name in draw.sample(NAMES, 6):
            email = f"{name.lower()}{draw.randint(10, 99)}@mail.example"
            db.execute(
                "insert into customers values(?, ?, ?)",
                (email, name, draw.choice(["card", "voucher", "transfer"])),
            )
            for _ in range(2):
                item, status = draw.choice(sorted(GOODS)), draw.choice(["pending", "shipped", "delivered"])
                days = draw.randint(1, 60) if status == "delivered" else None
                number = f"A{draw.randint(1000, 9999)}"
                row = (
                    number,
                    email,
                    item,
                    draw.choice(COLOURS),
                    GOODS[item],
                    status,
                    days,
                    f"{draw.randint(1, 90)} Mill Road",
                    "",
                )
                db.execute("insert or ignore into orders values(?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        return db

    @staticmethod
    def digest(db):
        rows = db.execute("select * from orders order by id").fetchall()
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def spend(self):
        self.s["used"] += 1
        if self.s["used"] > self.limit:
            raise ToolError("The customer has left: end your turn without a call.")

    def order(self, number):
        self.spend()
        if self.s["known"] is None:
            raise ToolError("rule 1: look the customer up first")
        row = self.db.execute(
            "select email, status, delivered_days_ago, item, colour, address, price, refund from orders where id = ?",
            (number,),
        ).fetchone()
        if row is None or row[0] != self.s["known"]:
            raise ToolError(f"this customer has no order {number}")
        keys = ("email", "status", "delivered_days_ago", "item", "colour", "address", "price", "refund")
        return dict(zip(keys, row))

    @tool
    def find_customer(self, email: str):
        "Look a customer up by e-mail address: name, way of payment and numbers of orders."
        self.spend()
        row = self.db.execute("select name, paid_with from customers where email = ?", (email,)).fetchone()
        if row is None:
            raise ToolError(f"there is no customer {email}")
        self.s["known"] = email
        orders = [
            r[0] for r in self.db.execute("select id from orders where email = ? order by id", (email,))
        ]
        return {"name": row[0], "paid_with": row[1], "orders": orders}

    @tool
    def get_order(self, number: str):
        "Read an order of the customer."
        return self.order(number)

    @tool
    def cancel_order(self, number: str):
        "Cancel an order."
        self.order(number)
        self.db.execute("update orders set status = 'cancelled' where id = ?", (number,))
        return "cancelled"

    @tool
    def change_order(self, number: str, address: str = "", colour: str = ""):
        "Change the address of an order, or the colour of its item."
        self.order(number)
        if colour and colour not in COLOURS:
            raise ToolError(f"colour is {colour!r}; allowed: {', '.join(COLOURS)}")
        if not address and not colour:
            raise ToolError("give an address or a colour")
        for column, value in (("address", address), ("colour", colour)):
            if value:
                self.db.execute(f"update orders set {column} = ? where id = ?", (value, number))
        return "changed"

    @tool
    def return_order(self, number: str, refund_to: str):
        "Take an order back, and refund its price to card, voucher or transfer."
        self.order(number)
        if refund_to not in ("card", "voucher", "transfer"):
            raise ToolError(f"refund_to is {refund_to!r}; allowed: card, voucher, transfer")
        self.db.execute("update orders set status = 'returned', refund = ? where id = ?", (refund_to, number))
        return "returned"

    @tool
    def refuse(self, reason: str):
        "Refuse what the customer asks for, with the rule that forbids it."
        self.spend()
        self.s["refused"] = self.s["finished"] = True
        return Done("The customer is disappointed, and leaves.")

    @tool
    def finish(self):
        "End the service: everything is done."
        self.spend()
        self.s["finished"] = True
        return Done("The customer thanks you.")

    def step(self, text):
        """What the customer answers to a message."""
        self.spend()
        wish = self.task["wish"]
        said = text.lower()
        answers = []
        if re.search(r"e-?mail|address of your account|who are you|your name", said):
            answers.append(f"My e-mail address is {wish['email']}.")
        if re.search(r"order|number|which", said):
            answers.append(f"It is order {wish['number']}.")
        if wish.get("value") and re.search(r"colou?r|new|address|what", said):
            answers.append(f"I want {wish['value']}.")
        return "Customer: " + (" ".join(answers) or "I only want what I asked for.")

    @staticmethod
    def forbidden(db, wish):
        """Whether the policy forbids a wish."""
        query = "select status, delivered_days_ago, email from orders where id = ?"
        status, days, email = db.execute(query, (wish["number"],)).fetchone()
        if email != wish["email"]:
            return True
        if wish["what"] == "return":
            return status != "delivered" or days > RETURN_DAYS
        return status != "pending"

    @classmethod
    def act(cls, db, wish):
        """Does what the policy allows of a wish. True: it is refused."""
        if cls.forbidden(db, wish):
            return True
        if wish["what"] == "return":
            query = "select paid_with from customers where email = ?"
            (way,) = db.execute(query, (wish["email"],)).fetchone()
            change = "update orders set status = 'returned', refund = ? where id = ?"
            db.execute(change, (way, wish["number"]))
            return False
        column, value = ("status", "cancelled") if wish["what"] == "cancel" else (wish["what"], wish["value"])
        db.execute(f"update orders set {column} = ? where id = ?", (value, wish["number"]))
        return False

    def reward(self, task):
        expected = self.shop(task.world)
        refused = self.act(expected, task.wish)
        same = self.digest(self.db) == self.digest(expected)
        # A refusal without a look at the customer is a guess.
        right = (
            same
            and self.s["finished"]
            and self.s["refused"] == refused
            and self.s["known"] == task.wish["email"]
        )
        return {"reward": right, "database": same, "calls_used": self.s["used"]}

    def state(self):
        return {"orders": self.digest(self.db), "known": self.s["known"], "refused": self.s["refused"]}

    def snapshot(self):
        return {"s": self.s, "task": self.task, "orders": self.db.execute("select * from orders").fetchall()}

    def restore(self, snapshot):
        self.s, self.task = snapshot["s"], snapshot["task"]
        self.db = self.shop(self.task["world"])
        self.db.execute("delete from orders")
        self.db.executemany("insert into orders values(?, ?, ?, ?, ?, ?, ?, ?, ?)", snapshot["orders"])

    @classmethod
    def tasks(cls, split, seed):
        asked = {
            "cancel": "I want to cancel an order.",
            "return": "I want to return an order and have my money back.",
            "address": "My order must go to another address.",
            "colour": "I want another colour for what I ordered.",
        }
        for i in range(1000 if split == "train" else 200):
            world = f"retail {split} {seed} {i}"
            draw, db = random.Random(f"wish {world}"), cls.shop(world)
            orders = db.execute("select id, email, colour from orders order by id").fetchall()
            emails = sorted({email for _, email, _ in orders})
            wishes = [
                {"what": w, "number": n, "email": e}
                for w in asked
                for n, owner, _ in orders
                for e in {owner, draw.choice(emails)}
            ]
            # One of three is forbidden, so that refusing always does not pay.
            refused = draw.random() < 1 / 3
            fitting = [wish for wish in wishes if cls.forbidden(db, wish) == refused] or wishes
            wish = draw.choice(sorted(fitting, key=str))
            own = next(colour for number, _, colour in orders if number == wish["number"])
            values = {
                "address": f"{draw.randint(100, 200)} Lake Street",
                "colour": draw.choice([c for c in COLOURS if c != own]),
            }
            wish["value"] = values.get(wish["what"])
            yield {
                "prompt": f"Customer: {asked[wish['what']]}",
                "kind": wish["what"],
                "world": world,
                "wish": wish,
            }

    @classmethod
    def gold(cls, task):
        db, wish = cls.shop(task.world), task.wish
        begin = [
            "What is your e-mail address, and which order is it? What do you want new?",
            ("find_customer", {"email": wish["email"]}),
        ]
        if cls.act(db, wish):
            return [*begin, ("refuse", {"reason": "the rules forbid it"})]
        number = wish["number"]
        (refund,) = db.execute("select refund from orders where id = ?", (number,)).fetchone()
        call = {
            "cancel": ("cancel_order", {"number": number}),
            "return": ("return_order", {"number": number, "refund_to": refund}),
            "address": ("change_order", {"number": number, "address": wish["value"]}),
            "colour": ("change_order", {"number": number, "colour": wish["value"]}),
        }[wish["what"]]
        return [*begin, call, ("finish", {})]
