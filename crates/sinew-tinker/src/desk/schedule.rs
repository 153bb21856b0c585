//! The order in which commands of models run, as a pure state machine.
//!
//! Commands of a model run in the order of their `seq`; a missing one holds the later ones back. Tenants take
//! turns by computed tokens: a turn ends with an optimizer step or a quantum, and whoever has computed more
//! than its share waits until the others have caught up. So a tenant with deep queues or large batches delays
//! another one by at most a turn of each tenant.

use super::prepared::Kind;
use super::types::{ModelId, RequestId};
use std::collections::{BTreeMap, VecDeque};

/// The place after all others of a model: its end. The largest number that the journal holds.
pub(super) const LAST: u64 = i64::MAX as u64;

/// A command that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) request: RequestId,
    /// Tokens that it computes.
    pub(super) cost: u64,
    pub(super) kind: Kind,
}

/// A command that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) model: ModelId,
    pub(super) seq: u64,
    pub(super) request: RequestId,
    pub(super) cost: u64,
    pub(super) kind: Kind,
}

/// Commands of a model.
#[derive(Clone, Debug)]
struct Line {
    tenant: String,
    /// Seq of the next command to run.
    next: u64,
    waiting: BTreeMap<u64, Item>,
}

impl Line {
    /// Seq of the command that may run.
    fn head(&self) -> Option<u64> {
        [self.next, LAST]
            .into_iter()
            .find(|seq| self.waiting.contains_key(seq))
    }
}

/// The share of a tenant.
#[derive(Clone, Debug, Default)]
struct Account {
    /// Tokens that it may still compute in this round; below 0, what it has computed ahead of the others.
    credit: i64,
    /// Its models, in the order of their turns.
    models: VecDeque<ModelId>,
}

/// The model whose turn it is.
#[derive(Clone, Debug)]
struct Keeper {
    model: ModelId,
    used: u64,
}

/// All models and their commands.
#[derive(Clone, Debug)]
pub(super) struct Schedule {
    quantum: u64,
    /// Whether a turn only ends with a step, or without a command that may run: changing the model costs
    /// more than a long turn.
    until_step: bool,
    lines: BTreeMap<ModelId, Line>,
    accounts: BTreeMap<String, Account>,
    /// Tenants in the order of their turns.
    round: VecDeque<String>,
    keeper: Option<Keeper>,
    running: Option<Turn>,
}

impl Schedule {
    /// An empty schedule. `quantum` is at least 1.
    pub(super) fn new(quantum: u64, until_step: bool) -> Self {
        Self {
            quantum: quantum.clamp(1, 1 << 40),
            until_step,
            lines: BTreeMap::new(),
            accounts: BTreeMap::new(),
            round: VecDeque::new(),
            keeper: None,
            running: None,
        }
    }

    /// Adds a model whose next command has `next` as its seq.
    pub(super) fn add(&mut self, model: &ModelId, tenant: &str, next: u64) {
        if self.lines.contains_key(model) {
            return;
        }
        let line = Line {
            tenant: tenant.to_owned(),
            next,
            waiting: BTreeMap::new(),
        };
        self.lines.insert(model.clone(), line);
        if !self.accounts.contains_key(tenant) {
            self.accounts.insert(tenant.to_owned(), Account::default());
            self.round.push_back(tenant.to_owned());
        }
        if let Some(account) = self.accounts.get_mut(tenant) {
            account.models.push_back(model.clone());
        }
    }

    /// Removes a model. Returns its commands that wait; one that runs is not among them.
    pub(super) fn remove(&mut self, model: &ModelId) -> Vec<RequestId> {
        let Some(line) = self.lines.remove(model) else {
            return Vec::new();
        };
        if let Some(account) = self.accounts.get_mut(&line.tenant) {
            account.models.retain(|own| own != model);
            if account.models.is_empty() && account.credit >= 0 {
                self.accounts.remove(&line.tenant);
                self.round.retain(|tenant| *tenant != line.tenant);
            }
        }
        if self.keeper.as_ref().is_some_and(|k| k.model == *model) {
            self.keeper = None;
        }
        line.waiting
            .into_values()
            .map(|item| item.request)
            .collect()
    }

    /// Adds a command. One whose turn is over is ignored.
    pub(super) fn enter(&mut self, model: &ModelId, seq: u64, item: Item) {
        if let Some(line) = self.lines.get_mut(model)
            && seq >= line.next
        {
            line.waiting.entry(seq).or_insert(item);
        }
    }

    /// Commands that wait.
    pub(super) fn waiting(&self) -> usize {
        self.lines.values().map(|line| line.waiting.len()).sum()
    }

    /// The command of a model that runs.
    pub(super) fn running(&self, model: &ModelId) -> Option<RequestId> {
        let turn = self.running.as_ref().filter(|turn| turn.model == *model);
        turn.map(|turn| turn.request.clone())
    }

    /// Whether a command of a model waits or runs.
    pub(super) fn is_active(&self, model: &ModelId) -> bool {
        let runs = self.running.as_ref().is_some_and(|t| t.model == *model);
        let line = self.lines.get(model);
        runs || line.is_some_and(|line| !line.waiting.is_empty())
    }

    /// Starts the next command, unless one runs or none may.
    pub(super) fn next(&mut self) -> Option<Turn> {
        if self.running.is_some() {
            return None;
        }
        let model = match self.kept() {
            Some(model) => model,
            None => self.rotate()?,
        };
        self.start(&model)
    }

    /// The model whose turn is not over.
    fn kept(&self) -> Option<ModelId> {
        let keeper = self.keeper.as_ref()?;
        let may = self.until_step || keeper.used < self.quantum;
        (may && self.is_ready(&keeper.model)).then(|| keeper.model.clone())
    }

    fn is_ready(&self, model: &ModelId) -> bool {
        let line = self.lines.get(model);
        line.is_some_and(|line| line.head().is_some())
    }

    /// Gives the turn to the next tenant that has credit, and to the next of its models.
    fn rotate(&mut self) -> Option<ModelId> {
        let able: Vec<String> = self
            .accounts
            .iter()
            .filter(|(_, account)| account.models.iter().any(|model| self.is_ready(model)))
            .map(|(tenant, _)| tenant.clone())
            .collect();
        let credits = able.iter().filter_map(|tenant| self.accounts.get(tenant));
        let most = credits.map(|account| account.credit).max()?;
        if most <= 0 {
            let quantum = self.quantum as i64;
            let rounds = (1 - most + quantum - 1) / quantum;
            for tenant in &able {
                if let Some(account) = self.accounts.get_mut(tenant) {
                    account.credit += rounds * quantum;
                }
            }
        }
        let has_credit = |tenant: &String| {
            let account = self.accounts.get(tenant);
            able.contains(tenant) && account.is_some_and(|account| account.credit > 0)
        };
        let at = self.round.iter().position(has_credit)?;
        let tenant = self.round.remove(at)?;
        self.round.push_back(tenant.clone());
        let models = &self.accounts.get(&tenant)?.models;
        let at = models.iter().position(|model| self.is_ready(model))?;
        let account = self.accounts.get_mut(&tenant)?;
        let model = account.models.remove(at)?;
        account.models.push_back(model.clone());
        self.keeper = Some(Keeper {
            model: model.clone(),
            used: 0,
        });
        Some(model)
    }

    fn start(&mut self, model: &ModelId) -> Option<Turn> {
        let line = self.lines.get_mut(model)?;
        let seq = line.head()?;
        let item = line.waiting.remove(&seq)?;
        if let Some(account) = self.accounts.get_mut(&line.tenant) {
            let cost = i64::try_from(item.cost).unwrap_or(i64::MAX);
            account.credit = account.credit.saturating_sub(cost);
        }
        if let Some(keeper) = &mut self.keeper {
            keeper.used = keeper.used.saturating_add(item.cost);
        }
        let turn = Turn {
            model: model.clone(),
            seq,
            request: item.request,
            cost: item.cost,
            kind: item.kind,
        };
        self.running = Some(turn.clone());
        Some(turn)
    }

    /// The command that runs has ended. Returns it.
    pub(super) fn done(&mut self) -> Option<Turn> {
        let turn = self.running.take()?;
        if let Some(line) = self.lines.get_mut(&turn.model)
            && turn.seq != LAST
        {
            line.next = turn.seq + 1;
        }
        if turn.kind.ends_turn() {
            self.keeper = None;
        }
        Some(turn)
    }

    /// Whether a command does not run because one of another tenant does. One that a missing command holds
    /// back waits for its own client.
    pub(super) fn waits_for_others(&self, model: &ModelId, seq: u64) -> bool {
        let running = self.running.as_ref();
        let running = running.and_then(|turn| self.lines.get(&turn.model));
        let (Some(running), Some(line)) = (running, self.lines.get(model)) else {
            return false;
        };
        let has_all_before = (line.next..seq).all(|seq| line.waiting.contains_key(&seq));
        running.tenant != line.tenant && (seq == LAST || has_all_before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn item(name: &str, cost: u64, step: bool) -> Item {
        let kind = if step {
            Kind::OptimStep
        } else {
            Kind::ForwardBackward
        };
        Item {
            request: RequestId::from(name),
            cost,
            kind,
        }
    }

    fn model(name: &str) -> ModelId {
        ModelId::from(name)
    }

    /// Runs everything that may run, and returns the requests in order.
    fn drain(schedule: &mut Schedule) -> Vec<String> {
        let mut order = Vec::new();
        while let Some(turn) = schedule.next() {
            order.push(turn.request.to_string());
            assert_eq!(schedule.done(), Some(turn));
        }
        order
    }

    #[test]
    fn a_gap_holds_back_what_follows() {
        let mut schedule = Schedule::new(100, false);
        let m = model("m");
        schedule.add(&m, "ann", 1);
        schedule.enter(&m, 3, item("c", 1, false));
        schedule.enter(&m, 2, item("b", 1, false));
        assert_eq!(schedule.next(), None);
        schedule.enter(&m, 1, item("a", 1, false));
        assert_eq!(drain(&mut schedule), ["a", "b", "c"]);
        schedule.enter(&m, 2, item("late", 1, false));
        assert_eq!(schedule.next(), None);
        assert_eq!(schedule.waiting(), 0);
    }

    #[test]
    fn a_turn_lasts_until_the_step() {
        let mut schedule = Schedule::new(100, false);
        for (name, tenant) in [("a", "ann"), ("b", "bob")] {
            let m = model(name);
            schedule.add(&m, tenant, 1);
            for seq in 1..=4 {
                let request = format!("{name}{seq}");
                schedule.enter(&m, seq, item(&request, 10, seq % 2 == 0));
            }
        }
        let order = drain(&mut schedule);
        assert_eq!(order, ["a1", "a2", "b1", "b2", "a3", "a4", "b3", "b4"]);
    }

    #[test]
    fn an_unload_runs_after_what_may_run() {
        let mut schedule = Schedule::new(100, false);
        let m = model("m");
        schedule.add(&m, "ann", 1);
        schedule.enter(&m, LAST, item("unload", 1, true));
        schedule.enter(&m, 1, item("one", 1, false));
        schedule.enter(&m, 3, item("three", 1, false));
        assert_eq!(schedule.next().map(|t| t.request), Some("one".into()));
        schedule.done();
        assert_eq!(schedule.next().map(|t| t.seq), Some(LAST));
        assert_eq!(schedule.remove(&m), [RequestId::from("three")]);
        schedule.done();
        assert_eq!(schedule.next(), None);
        schedule.enter(&m, 1, item("late", 1, false));
        assert_eq!(schedule.next(), None);
    }

    #[test]
    fn others_are_the_reason_unless_a_command_is_missing() {
        let mut schedule = Schedule::new(100, false);
        schedule.add(&model("a"), "ann", 1);
        schedule.add(&model("b"), "bob", 1);
        schedule.enter(&model("a"), 1, item("a1", 10, false));
        schedule.enter(&model("a"), 2, item("a2", 10, false));
        schedule.enter(&model("b"), 1, item("b1", 10, false));
        schedule.enter(&model("b"), 3, item("b3", 10, false));
        let waits = |schedule: &Schedule, name, seq| schedule.waits_for_others(&model(name), seq);
        assert!(!waits(&schedule, "b", 1), "nothing runs");
        schedule.next();
        assert!(waits(&schedule, "b", 1));
        assert!(waits(&schedule, "b", LAST));
        assert!(!waits(&schedule, "b", 3), "2 is missing");
        assert!(!waits(&schedule, "a", 1), "it runs");
        assert!(!waits(&schedule, "a", 2), "its own tenant has the turn");
    }

    /// Commands of some models: tenant, and cost and step of each command.
    type Plan = Vec<(usize, Vec<(u64, bool)>)>;

    fn plans() -> impl Strategy<Value = Plan> {
        let command = (1u64..400, any::<bool>());
        let line = (0usize..3, prop::collection::vec(command, 1..12));
        prop::collection::vec(line, 1..6)
    }

    proptest! {
        #[test]
        fn every_command_runs_once_and_in_order(
            plan in plans(),
            picks in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..400),
            quantum in 1u64..1000,
            until_step in any::<bool>(),
        ) {
            let mut schedule = Schedule::new(quantum, until_step);
            let mut arrivals = Vec::new();
            for (at, (tenant, commands)) in plan.iter().enumerate() {
                schedule.add(&model(&at.to_string()), &format!("t{tenant}"), 1);
                for (i, (cost, step)) in commands.iter().enumerate() {
                    arrivals.push((at, i as u64 + 1, *cost, *step));
                }
            }
            let total = arrivals.len();
            let mut seen: BTreeMap<ModelId, u64> = BTreeMap::new();
            let mut ran = 0;
            let mut run = |schedule: &mut Schedule, ran: &mut usize| {
                if let Some(turn) = schedule.next() {
                    let last = seen.entry(turn.model.clone()).or_insert(0);
                    assert_eq!(turn.seq, *last + 1);
                    *last = turn.seq;
                    *ran += 1;
                    schedule.done();
                }
            };
            for (index, runs) in picks {
                if !arrivals.is_empty() {
                    let (at, seq, cost, step) = arrivals.swap_remove(index.index(arrivals.len()));
                    let name = format!("{at}-{seq}");
                    schedule.enter(&model(&at.to_string()), seq, item(&name, cost, step));
                }
                if runs {
                    run(&mut schedule, &mut ran);
                }
            }
            for (at, seq, cost, step) in arrivals {
                let name = format!("{at}-{seq}");
                schedule.enter(&model(&at.to_string()), seq, item(&name, cost, step));
            }
            for _ in 0..total {
                run(&mut schedule, &mut ran);
            }
            prop_assert_eq!(ran, total);
            prop_assert_eq!(schedule.waiting(), 0);
        }

        #[test]
        fn tenants_that_always_wait_compute_nearly_the_same(
            plan in plans(),
            quantum in 1u64..1000,
        ) {
            let mut schedule = Schedule::new(quantum, false);
            let mut left: BTreeMap<String, u64> = BTreeMap::new();
            let mut owners = BTreeMap::new();
            let mut costs = BTreeMap::new();
            for (at, (tenant, commands)) in plan.iter().enumerate() {
                let (m, owner) = (model(&at.to_string()), format!("t{tenant}"));
                schedule.add(&m, &owner, 1);
                for (i, (cost, step)) in commands.iter().enumerate() {
                    let name = format!("{at}-{i}");
                    schedule.enter(&m, i as u64 + 1, item(&name, *cost, *step));
                    costs.insert(RequestId::from(name), *cost);
                    *left.entry(owner.clone()).or_default() += 1;
                }
                owners.insert(m, owner);
            }
            let largest = costs.values().copied().max().unwrap_or(0);
            let mut served: BTreeMap<String, u64> =
                left.keys().map(|tenant| (tenant.clone(), 0)).collect();
            while let Some(turn) = schedule.next() {
                let owner = &owners[&turn.model];
                *served.get_mut(owner).unwrap() += costs[&turn.request];
                *left.get_mut(owner).unwrap() -= 1;
                schedule.done();
                if left.values().any(|left| *left == 0) {
                    break;
                }
                let most = served.values().max().unwrap();
                let least = served.values().min().unwrap();
                prop_assert!(most - least <= 2 * quantum + largest, "{served:?}");
            }
        }
    }
}
