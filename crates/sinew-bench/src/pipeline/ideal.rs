//! Schedules without any overhead, with all draws known, for comparison with the real ones.
//!
//! Two bounds are computed. The bound of one engine with `slots` places and passes of a given time is a list
//! schedule. It gives the places to the episodes with the longest rest first. The bound of training counts
//! only the waits of calls, as if engine and trainer took no time. If generation and training take turns, a
//! step lasts as long as its longest episode. If both run at once, a step ends with the group that completes
//! it, and as many groups begin.
//!
//! The schedules know all draws in advance, which no scheduler does. Schedulers cannot reach a ratio of 1, as
//! the rest of an episode is not known to them; a ratio below 0.9 shows overhead or a bad order.

use super::world::Calls;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// An engine that gives up to `slots` requests a token in each pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Engine {
    /// Requests that get a token in a pass.
    pub(super) slots: usize,
    /// Seconds of a pass, however many requests it serves.
    pub(super) pass_s: f64,
    /// Tokens of a turn, one a pass.
    pub(super) turn_tokens: usize,
}

/// An episode in a schedule: the calls that are still to come, the last first.
struct Rest {
    /// Seconds of its calls, the last one first.
    calls: Vec<f64>,
    /// Tokens that its turn still lacks.
    tokens: usize,
    /// Seconds of calls that are before it, a lower bound of what it still takes.
    left_s: f64,
}

/// A time, ordered; times are finite.
#[derive(Clone, Copy, PartialEq)]
struct At(f64);

impl Eq for At {}

impl PartialOrd for At {
    /// Same as [`Ord`].
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for At {
    /// Orders by time, so that the longest rest goes first.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Engine {
    /// Seconds of one episode that has the engine to itself.
    pub(super) fn alone_s(&self, calls: &[f64]) -> f64 {
        let passes = calls.len() * self.turn_tokens;
        calls.iter().sum::<f64>() + passes as f64 * self.pass_s
    }

    /// Seconds until all episodes are over, which begin together. Each pass serves the episodes with the
    /// longest time before them, waiting included, which is not known in reality.
    pub(super) fn schedule_s(&self, episodes: &[Vec<f64>]) -> f64 {
        let mut rest: Vec<Rest> = episodes
            .iter()
            .map(|calls| Rest {
                calls: calls.iter().rev().copied().collect(),
                tokens: self.turn_tokens,
                left_s: self.alone_s(calls),
            })
            .collect();
        let mut ready: Vec<usize> = (0..rest.len()).collect();
        let mut waiting: BinaryHeap<Reverse<(At, usize)>> = BinaryHeap::new();
        let (mut now, mut end) = (0.0f64, 0.0f64);
        while !(ready.is_empty() && waiting.is_empty()) {
            while let Some(Reverse((at, episode))) = waiting.peek().copied()
                && (at.0 <= now || ready.is_empty())
            {
                waiting.pop();
                now = now.max(at.0);
                ready.push(episode);
            }
            ready.sort_by(|a, b| rest[*b].left_s.total_cmp(&rest[*a].left_s));
            now += self.pass_s;
            let mut stay = ready.split_off(ready.len().min(self.slots));
            for episode in ready {
                let own = &mut rest[episode];
                own.tokens -= 1;
                own.left_s -= self.pass_s;
                if own.tokens > 0 {
                    stay.push(episode);
                    continue;
                }
                let call = own.calls.pop().unwrap_or_default();
                own.left_s -= call;
                own.tokens = self.turn_tokens;
                end = end.max(now + call);
                if !own.calls.is_empty() {
                    waiting.push(Reverse((At(now + call), episode)));
                }
            }
            ready = stay;
        }
        end
    }
}

/// Groups of a run in which only calls take time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Groups {
    /// Groups of a step, and episodes of a group.
    pub(super) of_step: usize,
    /// Episodes of a group.
    pub(super) size: usize,
}

impl Groups {
    /// Seconds until the slowest episode of a task's group is over.
    fn slowest_s(&self, calls: &Calls, task: usize) -> f64 {
        let members = (0..self.size).map(|m| calls.of(task, m).iter().sum::<f64>());
        members.fold(0.0, f64::max)
    }

    /// Seconds if generation and training take turns: each step takes as long as its slowest episode.
    pub(super) fn sync_s(&self, calls: &Calls, order: &[usize], steps: usize) -> f64 {
        let steps = order.chunks(self.of_step).take(steps);
        let slowest = |step: &[usize]| {
            let groups = step.iter().map(|t| self.slowest_s(calls, *t));
            groups.fold(0.0, f64::max)
        };
        steps.map(slowest).sum()
    }

    /// Computes the seconds of a run that overlaps both: the groups of a fixed number of steps run or wait,
    /// and a step takes the first complete ones.
    pub(super) fn async_s(
        &self,
        calls: &Calls,
        order: &[usize],
        steps: usize,
        staleness: usize,
    ) -> f64 {
        let mut begins = order.iter().map(|t| self.slowest_s(calls, *t));
        let mut running: BinaryHeap<Reverse<At>> = BinaryHeap::new();
        let first = self.of_step * (staleness + 1);
        running.extend(begins.by_ref().take(first).map(|s| Reverse(At(s))));
        let (mut now, mut complete) = (0.0, 0);
        while let Some(Reverse(at)) = running.pop()
            && complete < steps * self.of_step
        {
            (now, complete) = (at.0, complete + 1);
            if complete.is_multiple_of(self.of_step) {
                let next = begins.by_ref().take(self.of_step);
                running.extend(next.map(|s| Reverse(At(now + s))));
            }
        }
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENGINE: Engine = Engine {
        slots: 2,
        pass_s: 1.0,
        turn_tokens: 2,
    };

    #[test]
    fn a_schedule_is_bounded_by_the_engine_and_by_the_longest_episode() {
        // One episode: two passes, a call, two passes, a call.
        assert_eq!(ENGINE.schedule_s(&[vec![5.0, 1.0]]), 10.0);
        assert_eq!(ENGINE.alone_s(&[5.0, 1.0]), 10.0);
        // Three turns of two tokens each, two at a time: three passes for six tokens.
        assert_eq!(ENGINE.schedule_s(&[vec![0.0], vec![0.0], vec![0.0]]), 3.0);
        // The longest goes first, the others while it waits.
        let all = [vec![1.0], vec![1.0], vec![9.0]];
        assert_eq!(ENGINE.schedule_s(&all), 11.0);
        assert_eq!(ENGINE.schedule_s(&[]), 0.0);
    }

    #[test]
    fn streams_wait_less_than_steps_do() {
        let calls = Calls {
            turns: 3,
            shortest_s: 0.05,
            longest_s: 2.0,
            seed: 1,
        };
        let groups = Groups {
            of_step: 8,
            size: 4,
        };
        let order: Vec<usize> = (0..200).collect();
        let sync_s = groups.sync_s(&calls, &order, 10);
        let async_s = groups.async_s(&calls, &order, 10, 2);
        assert!(async_s < sync_s / 2.0, "{async_s} {sync_s}");
        // Nothing ahead gives the same time.
        assert!((groups.async_s(&calls, &order, 10, 0) - sync_s).abs() < 1e-9);
    }
}
