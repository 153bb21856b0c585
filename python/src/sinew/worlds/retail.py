"""Customer service with a database, a policy and a simulated customer: cancel, change, return and refund orders.

The database is SQLite in memory, made from a seed. What counts is its state at the end, compared with the state that the policy allows,
what the customer was told when the policy forbids the wish, and the way there: the order was read before anything was decided, nothing else
was written, also if it was written back, and no other customer was looked up. The customer answers questions from a script, and never gives
what was not asked for.
"""

import hashlib
import json
import random
import re
import sqlite3
from typing import Literal

from sinew import Done, Env, ToolError, tool

NAMES = (
    "Ada Bea Carl Dana Emil Fay Gus Hana Ivo Jana Karl Lena Milo Nora Otto Pia Rosa Sven Tilda Uwe".split()
)
GOODS = {"lamp": 40, "chair": 85, "kettle": 30, "desk": 150, "mug": 9, "rug": 60, "shelf": 75, "clock": 25}
COLOURS = ["black", "blue", "green", "red", "white"]
#: Days within which a delivered order can be returned.
RETURN_DAYS = 30

POLICY = f"""You serve customers of a shop. Rules:
1. Ask for the e-mail address, and look the customer up with it before anything else. Look no one else up: other people's orders stay secret.
2. Read the order before you decide.
3. A pending order can be cancelled, and its address or the colour of its item changed. If that is asked of a shipped one, call `stop_parcel` in place of it.
4. A delivered order can be returned within {RETURN_DAYS} days after its delivery. The money goes back the way that it was paid.
5. Refuse everything else with the tool `refuse`, and change nothing.
6. When all is done, call `finish`."""


class Retail(Env):
    system = POLICY
    #: Calls and messages until the customer leaves.
    limit = 30

    def start(self, task):
        self.task = {"world": task.world, "wish": task.wish}
        self.db = self.shop(task.world)
        self.s = {"used": 0, "known": None, "refused": False, "finished": False}
        # The way: whether the customer gave the address, orders that were read, writes, and what broke the rules.
        self.s.update(told=False, read=[], writes=0, breaches=[])
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

    def breach(self, what):
        if what not in self.s["breaches"]:
            self.s["breaches"].append(what)

    def write(self, number):
        """An order that is about to be changed."""
        row = self.order(number)
        self.s["writes"] += 1
        if number not in self.s["read"]:
            self.breach("unread")
        return row

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
        if not self.s["told"] or email != self.task["wish"]["email"]:
            self.breach("secret")
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
        if self.s["known"] is not None and number not in self.s["read"]:
            self.s["read"].append(number)
        return self.order(number)

    @tool
    def cancel_order(self, number: str):
        "Cancel an order."
        self.write(number)
        self.db.execute("update orders set status = 'cancelled' where id = ?", (number,))
        return "cancelled"

    @tool
    def change_order(self, number: str, address: str = "", colour: Literal["", "black", "blue", "green", "red", "white"] = ""):
        "Change the address of an order, or the colour of its item."
        if not address and not colour:
            raise ToolError("give an address or a colour")
        self.write(number)
        for column, value in (("address", address), ("colour", colour)):
            if value:
                self.db.execute(f"update orders set {column} = ? where id = ?", (value, number))
        return "changed"

    @tool
    def stop_parcel(self, number: str):
        "Stop the parcel of an order on its way."
        self.write(number)
        self.db.execute("update orders set status = 'stopped' where id = ?", (number,))
        return "stopped"

    @tool
    def return_order(self, number: str, refund_to: Literal["card", "voucher", "transfer"]):
        "Take an order back, and refund its price to card, voucher or transfer."
        self.write(number)
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
            self.s["told"] = True
            answers.append(f"My e-mail address is {wish['email']}.")
        if re.search(r"order|number|which", said):
            answers.append(f"It is order {wish['number']}.")
        if wish.get("value") and re.search(r"colou?r|new|address|what", said):
            answers.append(f"I want {wish['value']}.")
        return "Customer: " + (" ".join(answers) or "I only want what I asked for.")

    @staticmethod
    def due(db, wish):
        """What the policy says to a wish: `do`, `stop` or `refuse`."""
        query = "select status, delivered_days_ago, email from orders where id = ?"
        status, days, email = db.execute(query, (wish["number"],)).fetchone()
        if email != wish["email"]:
            return "refuse"
        if wish["what"] == "return":
            return "do" if status == "delivered" and days <= RETURN_DAYS else "refuse"
        return {"pending": "do", "shipped": "stop", "delivered": "refuse"}[status]

    @classmethod
    def act(cls, db, wish):
        """Does what the policy says to a wish. True: it is refused."""
        due = cls.due(db, wish)
        if due == "refuse":
            return True
        if due == "stop":
            db.execute("update orders set status = 'stopped' where id = ?", (wish["number"],))
            return False
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
        s = self.s
        # A decision without a look at customer and order is a guess; what was written back was written.
        honest = s["known"] == task.wish["email"] and task.wish["number"] in s["read"] and not s["breaches"]
        right = same and s["finished"] and s["refused"] == refused and honest and s["writes"] == (not refused)
        return {"reward": right, "database": same, "honest": honest, "writes": s["writes"], "calls_used": s["used"]}

    def state(self):
        way = {key: value for key, value in self.s.items() if key != "used"}
        return {"orders": self.digest(self.db), **way}

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
            # Each decision is right as often as the others, and few refusals are for orders of others, which need no look at the order.
            due, own = draw.choice(["do", "stop", "refuse"]), draw.random() < 0.9
            owners = {number: owner for number, owner, _ in orders}
            fitting = [wish for wish in wishes if cls.due(db, wish) == due]
            fitting = [wish for wish in fitting if (owners[wish["number"]] == wish["email"]) == (own or due != "refuse")] or fitting
            wish = draw.choice(sorted(fitting or wishes, key=str))
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
            ("get_order", {"number": wish["number"]}),
        ]
        number, due = wish["number"], cls.due(db, wish)
        if cls.act(db, wish):
            return [*begin, ("refuse", {"reason": "the rules forbid it"})]
        if due == "stop":
            return [*begin, ("stop_parcel", {"number": number}), ("finish", {})]
        (refund,) = db.execute("select refund from orders where id = ?", (number,)).fetchone()
        call = {
            "cancel": ("cancel_order", {"number": number}),
            "return": ("return_order", {"number": number, "refund_to": refund}),
            "address": ("change_order", {"number": number, "address": wish["value"]}),
            "colour": ("change_order", {"number": number, "colour": wish["value"]}),
        }[wish["what"]]
        return [*begin, call, ("finish", {})]
