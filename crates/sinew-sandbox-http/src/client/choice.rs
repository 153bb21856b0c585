//! The choice between several hosts: a state machine that gets the time as an argument.
//!
//! A host is asked for its state every few seconds. A host that does not answer is put aside at once, and
//! asked again after pauses that double; one that has not answered several times in a row is lost, and with
//! it the sandboxes on it. Only its next answer brings it back.
//!
//! The next sandbox goes to the host with the largest share of free places for its price, out of those that
//! answer, fit and do not drain. Places that were given since the host's last report count as taken.

use std::time::Duration;

/// Times and counts of the choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rules {
    /// Time between two reports of a host.
    pub(crate) refresh: Duration,
    /// Pause before the first repeat to a host that did not answer.
    pub(crate) first_pause: Duration,
    /// Longest pause.
    pub(crate) longest_pause: Duration,
    /// Questions without an answer, in a row, after which a host is lost.
    pub(crate) lost_after: u32,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            refresh: Duration::from_secs(2),
            first_pause: Duration::from_millis(500),
            longest_pause: Duration::from_secs(30),
            lost_after: 4,
        }
    }
}

/// Offer of a host, by its last report.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Offer {
    /// Places that were free when it reported.
    pub(crate) free: usize,
    /// All places.
    pub(crate) limit: usize,
    /// It has the level and the image.
    pub(crate) fits: bool,
    /// It is about to end.
    pub(crate) draining: bool,
    /// Price of an hour, if it is known and above 0.
    pub(crate) price_per_hour: Option<f64>,
}

/// A host.
#[derive(Clone, Debug, Default)]
struct Host {
    /// Last report; `None`: it has not answered yet, or not since it was put aside.
    offer: Option<Offer>,
    /// It belongs to the provider.
    member: bool,
    /// Sandboxes that were given to it so far.
    given: u64,
    /// The same number when it was asked for the last report.
    given_at_report: u64,
    /// The same number when it was asked for the report that is on its way; `None`: none is.
    asked_at: Option<u64>,
    /// Questions without an answer, in a row.
    silent: u32,
    /// Moment of the next question.
    ask_at: Duration,
    /// Number of the choice that took it last.
    last: u64,
}

impl Host {
    /// Places that are free as far as is known.
    fn free(&self, offer: &Offer) -> usize {
        let since =
            usize::try_from(self.given.saturating_sub(self.given_at_report)).unwrap_or(usize::MAX);
        offer.free.saturating_sub(since)
    }
}

/// Hosts, and which of them gets the next sandbox. A host is named by its place.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    rules: Rules,
    hosts: Vec<Host>,
    /// Number of the latest choice.
    choices: u64,
}

impl Choice {
    /// No hosts.
    pub(crate) fn new(rules: Rules) -> Self {
        Self {
            rules,
            hosts: Vec::new(),
            choices: 0,
        }
    }

    /// Adds a host, and returns its place. It is asked at once.
    pub(crate) fn add(&mut self, now: Duration) -> usize {
        self.hosts.push(Host {
            member: true,
            ask_at: now,
            ..Host::default()
        });
        self.hosts.len() - 1
    }

    /// Makes a host a member again, or no longer. A host that is no member gets no sandbox; those that it has
    /// go on.
    pub(crate) fn set_member(&mut self, at: usize, member: bool, now: Duration) {
        let host = &mut self.hosts[at];
        if member && !host.member {
            host.ask_at = now;
            host.offer = None;
        }
        host.member = member;
    }

    /// Hosts to ask for their state now. The answer comes by [`Choice::answered`] or [`Choice::silent`].
    pub(crate) fn due(&mut self, now: Duration) -> Vec<usize> {
        let mut due = Vec::new();
        for (at, host) in self.hosts.iter_mut().enumerate() {
            if host.member && host.asked_at.is_none() && host.ask_at <= now {
                host.asked_at = Some(host.given);
                due.push(at);
            }
        }
        due
    }

    /// Moment of the next question, if one is planned.
    pub(crate) fn next_question(&self) -> Option<Duration> {
        let waiting = self
            .hosts
            .iter()
            .filter(|h| h.member && h.asked_at.is_none());
        waiting.map(|h| h.ask_at).min()
    }

    /// A host reported.
    pub(crate) fn answered(&mut self, at: usize, offer: Offer, now: Duration) {
        let host = &mut self.hosts[at];
        host.given_at_report = host.asked_at.take().unwrap_or(host.given);
        host.offer = Some(offer);
        host.silent = 0;
        host.ask_at = now + self.rules.refresh;
    }

    /// A host did not answer a question. True: it is lost by that.
    pub(crate) fn silent(&mut self, at: usize, now: Duration) -> bool {
        let rules = self.rules;
        let host = &mut self.hosts[at];
        host.asked_at = None;
        host.offer = None;
        host.silent = host.silent.saturating_add(1);
        let doubled = 1_u32.checked_shl(host.silent - 1).unwrap_or(u32::MAX);
        let pause = rules.first_pause.saturating_mul(doubled);
        host.ask_at = now + pause.min(rules.longest_pause);
        host.silent == rules.lost_after
    }

    /// A request to a host broke: it is put aside and asked at once.
    pub(crate) fn suspect(&mut self, at: usize, now: Duration) {
        let host = &mut self.hosts[at];
        if host.offer.take().is_some() {
            host.ask_at = now;
        }
    }

    /// The host for the next sandbox; `None`: none answers and fits. Where all are full as far as is known,
    /// the one that was chosen longest ago. [`Choice::not_made`] gives the place back.
    pub(crate) fn choose(&mut self) -> Option<usize> {
        let open = |h: &Host| h.offer.filter(|o| h.member && o.fits && !o.draining);
        let prices = self.hosts.iter().filter_map(open);
        let cheapest = prices
            .filter_map(|o| o.price_per_hour)
            .min_by(f64::total_cmp);
        let score = |host: &Host, offer: &Offer| {
            let share = host.free(offer) as f64 / offer.limit.max(1) as f64;
            match (offer.price_per_hour, cheapest) {
                (Some(price), Some(cheapest)) => share * cheapest / price,
                _ => share,
            }
        };
        let mut best: Option<(f64, u64, usize)> = None;
        for (at, host) in self.hosts.iter().enumerate() {
            let Some(offer) = open(host) else { continue };
            let own = score(host, &offer);
            let better = best
                .is_none_or(|(score, last, _)| own > score || (own == score && host.last < last));
            if better {
                best = Some((own, host.last, at));
            }
        }
        let (_, _, at) = best?;
        self.choices += 1;
        let host = &mut self.hosts[at];
        host.last = self.choices;
        host.given += 1;
        Some(at)
    }

    /// A sandbox was not made on a host. `full`: it has no room, whatever it reported.
    pub(crate) fn not_made(&mut self, at: usize, full: bool) {
        let host = &mut self.hosts[at];
        if full && let Some(offer) = &mut host.offer {
            offer.free = 0;
        } else if host.given > host.given_at_report {
            host.given -= 1;
        }
    }

    /// Number of hosts that can get sandboxes now.
    pub(crate) fn open(&self) -> usize {
        let open = |h: &&Host| h.member && h.offer.is_some_and(|o| o.fits && !o.draining);
        self.hosts.iter().filter(open).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn offer(free: usize, price: Option<f64>) -> Offer {
        Offer {
            free,
            limit: 8,
            fits: true,
            draining: false,
            price_per_hour: price,
        }
    }

    /// Hosts that have reported.
    fn hosts(offers: &[Offer]) -> Choice {
        let mut choice = Choice::new(Rules::default());
        for offer in offers {
            let at = choice.add(s(0));
            choice.due(s(0));
            choice.answered(at, *offer, s(0));
        }
        choice
    }

    #[test]
    fn load_is_spread_by_free_places() {
        let mut choice = hosts(&[offer(2, None), offer(8, None), offer(4, None)]);
        let mut given = [0; 3];
        for _ in 0..14 {
            given[choice.choose().unwrap()] += 1;
        }
        assert_eq!(given, [2, 8, 4]);
        // All are full: each is tried in turn.
        let tried: std::collections::BTreeSet<_> = (0..3).filter_map(|_| choice.choose()).collect();
        assert_eq!(tried.len(), 3);
    }

    #[test]
    fn a_cheaper_host_is_filled_further() {
        let mut choice = hosts(&[offer(8, Some(2.0)), offer(8, Some(1.0))]);
        let mut given = [0; 2];
        for _ in 0..6 {
            given[choice.choose().unwrap()] += 1;
        }
        assert!(given[1] > given[0], "{given:?}");
        for _ in 0..10 {
            given[choice.choose().unwrap()] += 1;
        }
        assert_eq!(given, [8, 8]);
    }

    #[test]
    fn hosts_that_do_not_fit_or_drain_get_nothing() {
        let unfit = Offer {
            fits: false,
            ..offer(8, None)
        };
        let draining = Offer {
            draining: true,
            ..offer(8, None)
        };
        let mut choice = hosts(&[unfit, draining]);
        assert_eq!((choice.choose(), choice.open()), (None, 0));
        let at = choice.add(s(0));
        assert_eq!(choice.choose(), None);
        choice.answered(at, offer(1, None), s(1));
        assert_eq!(choice.choose(), Some(at));
        choice.set_member(at, false, s(1));
        assert_eq!(choice.choose(), None);
    }

    #[test]
    fn a_silent_host_is_put_aside_lost_and_taken_back() {
        let mut choice = hosts(&[offer(8, None)]);
        let mut now = s(2);
        let mut lost = Vec::new();
        let mut pauses = Vec::new();
        for _ in 0..9 {
            assert_eq!(choice.due(now), [0]);
            assert_eq!(choice.due(now), [0; 0]);
            lost.push(choice.silent(0, now));
            assert_eq!(choice.choose(), None);
            let next = choice.next_question().unwrap();
            pauses.push((next - now).as_millis());
            now = next;
        }
        assert_eq!(lost.iter().filter(|l| **l).count(), 1);
        assert!(lost[3]);
        assert_eq!(pauses[..7], [500, 1000, 2000, 4000, 8000, 16_000, 30_000]);
        assert_eq!(choice.due(now), [0]);
        choice.answered(0, offer(8, None), now);
        assert_eq!(choice.choose(), Some(0));
    }

    #[test]
    fn a_broken_request_puts_a_host_aside_until_it_answers() {
        let mut choice = hosts(&[offer(8, None)]);
        choice.suspect(0, s(1));
        assert_eq!(choice.choose(), None);
        assert_eq!(choice.due(s(1)), [0]);
        choice.answered(0, offer(8, None), s(1));
        assert_eq!(choice.choose(), Some(0));
        // A host that is full says so before its next report.
        choice.not_made(0, true);
        let other = choice.add(s(1));
        choice.answered(other, offer(1, None), s(1));
        assert_eq!(choice.choose(), Some(other));
    }

    /// An event of the outside.
    #[derive(Clone, Debug)]
    enum Event {
        Ask,
        Answer(usize, usize, bool),
        Silent(usize),
        Suspect(usize),
        Choose(u8),
        Member(usize, bool),
        Wait(u64),
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            Just(Event::Ask),
            (0..4_usize, 0..6_usize, any::<bool>()).prop_map(|(h, f, d)| Event::Answer(h, f, d)),
            (0..4_usize).prop_map(Event::Silent),
            (0..4_usize).prop_map(Event::Suspect),
            (0..3_u8).prop_map(Event::Choose),
            (0..4_usize, any::<bool>()).prop_map(|(h, m)| Event::Member(h, m)),
            (0..5000_u64).prop_map(Event::Wait),
        ]
    }

    proptest! {
        /// Whatever happens, only members that answered last and do not drain are chosen, none gets more than
        /// it reported while another has room, and each member is asked again within the longest pause.
        #[test]
        fn the_choice_is_always_open_and_everybody_is_asked_again(
            events in proptest::collection::vec(event(), 0..200)
        ) {
            let rules = Rules::default();
            let mut choice = Choice::new(rules);
            let mut now = s(0);
            for _ in 0..4 {
                choice.add(now);
            }
            for event in events {
                match event {
                    Event::Ask => drop(choice.due(now)),
                    Event::Answer(at, free, draining) => {
                        let offer = Offer { draining, ..offer(free, None) };
                        choice.answered(at, offer, now);
                    }
                    Event::Silent(at) => {
                        choice.silent(at, now);
                    }
                    Event::Suspect(at) => choice.suspect(at, now),
                    Event::Member(at, member) => choice.set_member(at, member, now),
                    Event::Wait(ms) => now += Duration::from_millis(ms),
                    Event::Choose(end) => {
                        let before = choice.clone();
                        let free = |at: usize| {
                            let host = &before.hosts[at];
                            let offer = host.offer.filter(|o| host.member && !o.draining);
                            offer.map(|offer| host.free(&offer))
                        };
                        let most = (0..4).filter_map(free).max();
                        let chosen = choice.choose();
                        prop_assert_eq!(chosen.is_some(), before.open() > 0);
                        if let Some(at) = chosen {
                            prop_assert_eq!(free(at), most);
                            if end > 0 {
                                choice.not_made(at, end == 1);
                            }
                        }
                    }
                }
                for host in choice.hosts.iter().filter(|h| h.member && h.asked_at.is_none()) {
                    prop_assert!(host.ask_at <= now + rules.longest_pause);
                }
            }
        }
    }
}
