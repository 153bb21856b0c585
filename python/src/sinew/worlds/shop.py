"""A small shop in a browser: pages of HTML and forms, a cart and orders that the class keeps.

Levels: 1 a product by name; 2 with quantity and size; 3 by properties; 4 an order of two products; 5 a cart to be changed. Every task has
products of its own. The score compares cart and orders at the end with those of the task. Only `POST` changes them, prices come from
the catalogue only, and nothing on a page says what the goal is.
"""

import html
import random
import urllib.parse

from sinew.worlds.web import Move, Response, Web, choose, click, fill

#: Products of a shop, and results on a page.
PRODUCTS, SHOWN = 36, 6
#: Pieces of one product, lines of a cart or orders, and characters of a field, at most.
MOST_PIECES, MOST_LINES, LONGEST = 20, 20, 100
MAKERS = "Alder Birch Cedar Dune Ember Fjord Grove Harbor Iris Juniper Kestrel Lumen".split()
COLORS = ["red", "blue", "green", "black", "white"]
SIZES = ["small", "medium", "large"]
#: Clothes have sizes.
CATEGORIES = {
    "Kitchen": ["kettle", "mug", "pan"],
    "Office": ["lamp", "notebook", "chair"],
    "Garden": ["spade", "hose", "bench"],
    "Clothes": ["jacket", "scarf", "shirt"],
}
SHIPPING = ["standard", "express", "pickup"]
#: Stars that can be asked for, in tenths.
STARS = [40, 35, 30, 0]
PEOPLE = ["Ana Silva", "Ben Okoro", "Chen Wei", "Dina Haddad", "Emil Larsen", "Fay Jones", "Goro Abe", "Hana Novak"]
STREETS = ["Mill Lane", "High Street", "Oak Road", "Lake View", "Station Road", "Hill Top"]
CITIES = ["Leeds", "Porto", "Turin", "Ghent", "Malmo", "Brno"]
STYLE = (
    "body{font:15px sans-serif;margin:12px}nav a{margin-right:12px}li{margin:4px 0}label{display:block;margin:6px 0}.error{color:#b00}"
)
#: No script runs on a page of the shop, whatever was typed into it.
POLICY = ("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'")


def products(world):
    """All products of a shop. No two have one name or one price."""
    draw, found = random.Random(f"products {world}"), []
    while len(found) < PRODUCTS:
        category = draw.choice(list(CATEGORIES))
        kind = draw.choice(CATEGORIES[category])
        name, cents = f"{draw.choice(MAKERS)} {kind}", draw.randint(4, 120) * 100 + draw.choice([0, 25, 50, 95])
        if all(p["name"] != name and p["cents"] != cents for p in found):
            found.append(
                {
                    "id": len(found),
                    "name": name,
                    "category": category,
                    "kind": kind,
                    "color": draw.choice(COLORS),
                    "cents": cents,
                    "stars": draw.randint(20, 50),
                    "sizes": category == "Clothes",
                }
            )
    return found


def find(all, words="", category="", color="", stars=0, cents=None, by_price=False):
    """The products that fit a search, in its order."""
    found = [
        p
        for p in all
        if all_in(words, p["name"])
        and category in ("", p["category"])
        and color in ("", p["color"])
        and p["stars"] >= stars
        and (cents is None or p["cents"] <= cents)
    ]
    return sorted(found, key=lambda p: p["cents"] if by_price else p["name"])


def all_in(words, name):
    return all(word in name.lower() for word in words.lower().split())


def money(cents):
    return f"${cents // 100}.{cents % 100:02}"


def rating(tenths):
    return f"{tenths // 10}.{tenths % 10}"


def number(text, least, most):
    """The whole number of a text; none: it is no such number within the limits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most else None


def ordered(state):
    """Cart and orders, with lines in an order that does not depend on the way."""
    lines = lambda lines: sorted(lines, key=lambda line: (line["product"], line["size"], line["quantity"]))
    return {"cart": lines(state["cart"]), "orders": [{**order, "lines": lines(order["lines"])} for order in state["orders"]]}


# Tasks.


def line(draw, product, quantity=1):
    size = draw.choice(SIZES) if product["sizes"] else ""
    return {"product": product["id"], "size": size, "quantity": quantity}


def several(draw, all, count):
    """Lines of different products, with several pieces each."""
    return [line(draw, product, draw.randint(2, 5)) for product in draw.sample(all, count)]


def said(line, all):
    pieces = "piece" if line["quantity"] == 1 else "pieces"
    size = f" in size {line['size']}" if line["size"] else ""
    return f"{line['quantity']} {pieces} of the {all[line['product']]['name']}{size}"


def goal(level, world):
    """The goal of a task: the cart at the start, cart and orders at the end, the search of level 3; and its words."""
    all, draw = products(world), random.Random(f"goal {world}")
    start, end, search = [], {"cart": [], "orders": []}, {}
    if level in (1, 2):
        end["cart"] = [line(draw, draw.choice(all), draw.randint(2, 5) if level == 2 else 1)]
        prompt = f"Put {said(end['cart'][0], all)} into the cart."
    elif level == 3:
        example = draw.choice(all)
        stars = next(stars for stars in STARS if example["stars"] >= stars)
        search = {"words": example["kind"], "color": example["color"], "stars": stars}
        # The example itself fits, so that there is one.
        bought = line(draw, find(all, **search, by_price=True)[0])
        end["cart"] = [bought]
        size = f" in size {bought['size']}" if bought["size"] else ""
        prompt = f"Put the cheapest {example['color']} {example['kind']} with at least {rating(stars)} stars into the cart{size}."
    elif level == 4:
        order = {
            "lines": several(draw, all, 2),
            "name": draw.choice(PEOPLE),
            "street": f"{draw.randint(1, 99)} {draw.choice(STREETS)}",
            "city": draw.choice(CITIES),
            "shipping": draw.choice(SHIPPING),
        }
        end["orders"] = [order]
        first, second = (said(line, all) for line in order["lines"])
        prompt = f"Order {first} and {second} in one order for {order['name']}, {order['street']}, {order['city']}, "
        prompt += f"with {order['shipping']} shipping."
    else:
        start = several(draw, all, 3)
        gone, changed, _ = draw.sample(range(3), 3)
        quantity = draw.choice([n for n in range(1, 6) if n != start[changed]["quantity"]])
        end["cart"] = [{**line, "quantity": quantity} if at == changed else line for at, line in enumerate(start) if at != gone]
        name = lambda at: all[start[at]["product"]]["name"]
        prompt = f"In the cart, remove the {name(gone)} and set the quantity of the {name(changed)} to {quantity}."
    return {"start": start, "end": end, "search": search}, f"{prompt} Change nothing else. Call done at the end."


# Pages.


def page(title, pieces, body):
    title = html.escape(title)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
        f'<nav><a href="/">Home</a><a href="/cart">Cart ({pieces})</a></nav>'
        f'<form action="/search"><input name=q aria-label="Search"><button>Search</button></form><h1>{title}</h1>{body}</html>'
    )


def options(label, name, options, chosen):
    """A list of choices: pairs of a value and its text."""
    shown = "".join(f'<option value="{value}"{" selected" if value == chosen else ""}>{text}</option>' for value, text in options)
    return f"<label>{label} <select name={name}>{shown}</select></label>"


def same(values):
    return [(value, value) for value in values]


def error_of(text):
    return f"<p class=error role=alert>{text}</p>"


def filters(query):
    asked = lambda name: html.escape(query.get(name, ""))
    stars = [(str(s) if s else "0", f"{rating(s)} or more" if s else "any") for s in reversed(STARS)]
    return (
        f'<form action="/search"><input type=hidden name=q value="{asked("q")}">'
        + options("Category", "category", [("", "any"), *same(CATEGORIES)], query.get("category", ""))
        + options("Color", "color", [("", "any"), *same(COLORS)], query.get("color", ""))
        + options("Stars", "stars", stars, query.get("stars", "0"))
        + f'<label>Price at most <input name=most value="{asked("most")}"></label>'
        + options("Order", "order", [("name", "name"), ("price", "price, lowest first")], query.get("order", "name"))
        + "<button>Filter</button></form>"
    )


def results(query, found, at):
    """Filters, and one page of what was found."""
    kept = urllib.parse.urlencode({name: query.get(name, "") for name in ("q", "category", "color", "stars", "most", "order")})
    link = lambda at, text: f'<a href="/search?{html.escape(kept)}&amp;page={at}">{text}</a> '
    shown = "".join(
        f'<li><a href="/p/{p["id"]}">{p["name"]}</a> {p["color"]}, {money(p["cents"])}, {rating(p["stars"])} stars</li>'
        for p in found[at * SHOWN : (at + 1) * SHOWN]
    )
    before = link(at - 1, "Previous page") if at else ""
    after = link(at + 1, "Next page") if (at + 1) * SHOWN < len(found) else ""
    return f"{filters(query)}<p>{len(found)} found</p><ul>{shown}</ul>{before}{after}"


class Shop(Web):
    #: Levels that tasks are drawn from, 1 to 5; empty: all.
    levels = []

    @classmethod
    def setup_worker(cls):
        super().setup_worker()
        if not set(cls.levels) <= set(range(1, 6)):
            raise ValueError(f"options.levels is {cls.levels}; allowed: 1 to 5")

    def opened(self, task):
        self.goal, self.all = task.goal, products(task.world)
        self.shop = {"cart": [dict(line) for line in task.goal["start"]], "orders": []}
        return "/"

    def kept(self):
        return self.shop

    def answer(self, request):
        if request.method == "GET":
            answer = self.get(request.path, request.query)
        elif request.method == "POST":
            answer = self.post(request.path, request.form)
        else:
            answer = 405, "Not allowed", "<p>This is not allowed.</p>"
        if isinstance(answer, str):
            return Response(303, headers=(("location", answer),))
        status, title, body = answer
        text = page(title, sum(line["quantity"] for line in self.shop["cart"]), body)
        return Response(status, "text/html; charset=utf-8", text.encode(), (POLICY,))

    def get(self, path, query):
        """Pages, which change nothing: status, title and body."""
        if path == "/":
            links = [f'<li><a href="/search?category={name}">{name}</a></li>' for name in CATEGORIES]
            return 200, "Shop", f'<ul>{"".join(links)}<li><a href="/search">All products</a></li></ul>'
        if path == "/search":
            return self.search(query)
        if path == "/cart":
            return self.cart("")
        if path == "/checkout":
            return self.checkout({}, "")
        if path == "/thanks":
            return 200, "Thank you", "<p>Your order is on its way.</p>"
        return self.product(path[3:], "") if path.startswith("/p/") else self.missing()

    def post(self, path, form):
        """Changes cart or orders. A path to go to, or a page with what was wrong."""
        if path == "/cart":
            return self.add(form)
        if path == "/checkout":
            return self.order(form)
        return self.change(path[6:], form) if path.startswith("/cart/") else self.missing()

    def missing(self):
        return 404, "Not found", "<p>There is no such page.</p>"

    def search(self, query):
        most = number(query.get("most", "").lstrip("$"), 0, 10**6)
        found = find(
            self.all,
            query.get("q", "")[:LONGEST],
            query.get("category", ""),
            query.get("color", ""),
            number(query.get("stars", ""), 0, 50) or 0,
            None if most is None else 100 * most,
            query.get("order") == "price",
        )
        return 200, "Products", results(query, found, number(query.get("page", ""), 0, len(found)) or 0)

    def product(self, id, error):
        at = number(id, 0, PRODUCTS - 1)
        if at is None:
            return self.missing()
        p = self.all[at]
        sizes = options("Size", "size", [("", "choose"), *same(SIZES)], "") if p["sizes"] else ""
        return (
            200,
            p["name"],
            f"<p>{p['category']}, {p['color']}, {rating(p['stars'])} stars, {money(p['cents'])}</p>{error_of(error)}"
            f'<form method=post action="/cart"><input type=hidden name=id value={at}>{sizes}'
            "<label>Quantity <input name=quantity value=1></label><button>Add to cart</button></form>",
        )

    def add(self, form):
        """Puts pieces into the cart: with a size where there are some, and at most 20."""
        at, size, pieces = number(form.get("id", ""), 0, PRODUCTS - 1), form.get("size", ""), form.get("quantity", "")
        if at is None:
            return self.missing()
        pieces, cart = number(pieces, 1, MOST_PIECES), self.shop["cart"]
        if size not in (SIZES if self.all[at]["sizes"] else [""]):
            return self.product(str(at), "Choose a size.")
        if pieces is None:
            return self.product(str(at), f"The quantity must be 1 to {MOST_PIECES}.")
        for line in cart:
            if (line["product"], line["size"]) == (at, size):
                line["quantity"] = min(line["quantity"] + pieces, MOST_PIECES)
                return "/cart"
        if len(cart) >= MOST_LINES:
            return self.product(str(at), "The cart is full.")
        cart.append({"product": at, "size": size, "quantity": pieces})
        return "/cart"

    def change(self, at, form):
        at, pieces = number(at, 0, len(self.shop["cart"]) - 1), number(form.get("quantity", ""), 1, MOST_PIECES)
        if at is None:
            return self.missing()
        if form.get("do") == "remove":
            del self.shop["cart"][at]
        elif pieces is None:
            return self.cart(f"The quantity must be 1 to {MOST_PIECES}.")
        else:
            self.shop["cart"][at]["quantity"] = pieces
        return "/cart"

    def cart(self, error):
        if not self.shop["cart"]:
            return 200, "Cart", "<p>Your cart is empty.</p>"
        lines, total = "", 0
        for at, line in enumerate(self.shop["cart"]):
            p, size = self.all[line["product"]], f", {line['size']}" if line["size"] else ""
            total += p["cents"] * line["quantity"]
            lines += (
                f'<li>{p["name"]}{size}, {money(p["cents"])} <form method=post action="/cart/{at}">'
                f'<input name=quantity value={line["quantity"]} aria-label="Quantity of {p["name"]}">'
                f'<button name=do value=update>Update {p["name"]}</button>'
                f'<button name=do value=remove>Remove {p["name"]}</button></form></li>'
            )
        return 200, "Cart", f'{error_of(error)}<ul>{lines}</ul><p>Total {money(total)}</p><a href="/checkout">Check out</a>'

    def checkout(self, typed, error):
        """The form of an order, with what was typed."""
        texts = "".join(
            f'<label>{name.capitalize()} <input name={name} value="{html.escape(typed.get(name, ""))}"></label>'
            for name in ("name", "street", "city")
        )
        ways = "".join(f"<label><input type=radio name=shipping value={way}>{way}</label>" for way in SHIPPING)
        return (
            200,
            "Check out",
            f'{error_of(error)}<form method=post action="/checkout">{texts}<fieldset><legend>Shipping</legend>{ways}</fieldset>'
            "<button>Place order</button></form>",
        )

    def order(self, form):
        """Makes an order of the cart, if all fields are right."""
        typed = {name: form.get(name, "")[:LONGEST] for name in ("name", "street", "city", "shipping")}
        if not self.shop["cart"]:
            return self.checkout(typed, "Your cart is empty.")
        if not (typed["name"] and typed["street"] and typed["city"]):
            return self.checkout(typed, "Name, street and city are needed.")
        if typed["shipping"] not in SHIPPING:
            return self.checkout(typed, "Choose a way of shipping.")
        if len(self.shop["orders"]) >= MOST_LINES:
            return self.checkout(typed, "You have too many orders.")
        self.shop["orders"].append({"lines": self.shop["cart"], **typed})
        self.shop["cart"] = []
        return "/thanks"

    def reward(self):
        right = ordered(self.shop) == ordered(self.goal["end"])
        return {
            "reward": right and self.said_done,
            "right_state": right,
            "orders": len(self.shop["orders"]),
            "in_cart": sum(line["quantity"] for line in self.shop["cart"]),
            "requests_refused": self.page.refused if self.page else None,
        }

    @classmethod
    def tasks(cls, split, seed):
        levels = cls.levels or list(range(1, 6))
        for i in range(cls.train if split == "train" else cls.held_out):
            level, world = levels[i % len(levels)], f"shop {split} {seed} {i}"
            wanted, prompt = goal(level, world)
            yield {"prompt": prompt, "kind": f"shop/{level}", "world": world, "goal": wanted}

    def moves(self, task):
        level, end, all = int(task.kind[-1]), task.goal["end"], self.all
        if level in (1, 2):
            moves = self.buying(end["cart"][0])
        elif level == 3:
            search = task.goal["search"]
            moves = [
                fill(search["words"], "Search"),
                click("button", "Search"),
                choose(search["color"], "Color"),
                choose("price, lowest first", "Order"),
                *([choose(f"{rating(search['stars'])} or more", "Stars")] if search["stars"] else []),
                click("button", "Filter"),
                click("link", all[end["cart"][0]["product"]]["name"]),
                *self.putting(end["cart"][0]),
            ]
        elif level == 4:
            order = end["orders"][0]
            moves = [move for line in order["lines"] for move in self.buying(line)] + [click("link", "Check out")]
            moves += [fill(order[name], name.capitalize()) for name in ("name", "street", "city")]
            moves += [click("radio", order["shipping"]), click("button", "Place order")]
        else:
            moves = self.changing(task.goal)
        return [*moves, Move("done")]

    def buying(self, line):
        """Steps from any page to a line in the cart."""
        name = self.all[line["product"]]["name"]
        return [fill(name, "Search"), click("button", "Search"), click("link", name), *self.putting(line)]

    def putting(self, line):
        """Steps on the page of a product."""
        size = [choose(line["size"], "Size")] if line["size"] else []
        pieces = [fill(line["quantity"], "Quantity")] if line["quantity"] != 1 else []
        return [*size, *pieces, click("button", "Add to cart")]

    def changing(self, goal):
        kept = {line["product"]: line["quantity"] for line in goal["end"]["cart"]}
        moves = [click("link", f"Cart ({sum(line['quantity'] for line in goal['start'])})")]
        for line in goal["start"]:
            name, pieces = self.all[line["product"]]["name"], kept.get(line["product"])
            if pieces is None:
                moves.append(click("button", f"Remove {name}"))
            elif pieces != line["quantity"]:
                moves += [fill(pieces, f"Quantity of {name}"), click("button", f"Update {name}")]
        return moves
