"""An independent model of who stays in memory; it knows nothing of the package."""

from __future__ import annotations


class Oracle:
    """The same rules over a plain list, oldest first; entries are [expert, loading, ahead and unused]."""

    def __init__(self, slots):
        self.slots, self.list, self.pins, self.log = slots, [], [], []
        self.hits = self.misses = self.useful = self.wasted = 0

    def find(self, expert):
        return next((entry for entry in self.list if entry[0] == expert), None)

    def use(self, experts):
        missing = []
        for expert in experts:
            entry = self.find(expert)
            if entry and entry[2]:
                self.useful, entry[2] = self.useful + 1, False
            if entry and not entry[1]:
                self.hits += 1
            else:
                self.misses += 1
                missing.append(expert)
        self.pins += experts
        return missing

    def insert(self, experts, ahead=False):
        old = [entry for entry in self.list if not entry[1] and entry[0] not in self.pins]
        for expert in experts:
            if len(self.list) == self.slots:
                if not old:
                    return
                gone = old.pop(0)
                self.list.remove(gone)
                self.log.append(gone[0])
                self.wasted += gone[2]
            self.list.insert(0, [expert, True, ahead])

    def read_ahead(self, experts, most):
        new = [expert for expert in experts if not self.find(expert)]
        self.insert(new[: max(0, most - sum(entry[1] for entry in self.list))], ahead=True)

    def commit(self, experts):
        for entry in filter(None, map(self.find, experts)):
            self.list.remove(entry)
            self.list.append(entry)
        self.pins = []

    def show(self, experts):
        for expert in experts:
            self.find(expert)[1] = False
