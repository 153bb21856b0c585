//! Controls the number of episodes by the load of the engine: additive increase, multiplicative decrease.
//!
//! The constants are those of prime-rl, with two differences. Episodes above the limit are paused, never
//! cancelled, so no sampled token is lost. A queue of requests counts only while at least `grow_below` of the
//! KV capacity is in use: with free KV capacity, requests wait for computation, and fewer episodes would not
//! shorten the queue.

use sinew_types::EngineStatus;

/// Rules by which the limit on episodes grows and shrinks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PressureConfig {
    /// Factor by which the limit grows after as many episodes have ended as the limit allows.
    pub growth: f64,
    /// Share of the limit that must be in use before it grows.
    pub binding: f64,
    /// The limit grows only while less than this share of the KV capacity is in use.
    pub grow_below: f64,
    /// Above this share of the KV capacity in use, the limit is lowered so that `target` would be used, at
    /// most once per settling time.
    pub trim_above: f64,
    /// Above this share of the KV capacity in use, the limit is lowered at every reading.
    pub stop_above: f64,
    pub target: f64,
    /// Number of waiting requests per running request above which the engine counts as queueing.
    pub queue_ratio: f64,
    /// Number of readings in a row with queueing after which the limit is cut by the factor `queue_cut`.
    pub queue_readings: u32,
    pub queue_cut: f64,
    /// Factor of the cut after running requests lost their KV cache.
    pub preemption_cut: f64,
    /// Factor if this happens again within `gate_s` after the last such cut.
    pub escalated_cut: f64,
    /// Seconds after a cut during which the limit does not grow.
    pub gate_s: f64,
    /// Minimum seconds between two cuts, since the effect of a cut takes time. It does not apply above
    /// `stop_above`.
    pub settle_s: f64,
}

impl Default for PressureConfig {
    fn default() -> Self {
        Self {
            growth: 1.25,
            binding: 0.9,
            grow_below: 0.6,
            trim_above: 0.8,
            stop_above: 0.9,
            target: 0.7,
            queue_ratio: 0.5,
            queue_readings: 6,
            queue_cut: 0.9,
            preemption_cut: 0.8,
            escalated_cut: 0.5,
            gate_s: 15.0,
            settle_s: 1.0,
        }
    }
}

/// The limit, and the state that it is computed from.
#[derive(Debug)]
pub(super) struct Pressure {
    config: PressureConfig,
    limit: f64,
    ceiling: f64,
    ended: usize,
    queued: u32,
    preemptions: Option<u64>,
    last_cut_s: Option<f64>,
    last_preemption_cut_s: Option<f64>,
    pub(super) cuts: u64,
    pub(super) growths: u64,
}

/// Returns the share of the KV capacity that running requests hold, if the engine reports it.
pub(super) fn kv_use(status: &EngineStatus) -> Option<f64> {
    let total = status.kv_tokens_total;
    let used = total.saturating_sub(status.kv_tokens_free);
    (total > 0).then(|| used as f64 / total as f64)
}

impl Pressure {
    /// Creates the state with the limit at `ceiling`, its maximum.
    pub(super) fn new(config: PressureConfig, ceiling: usize) -> Self {
        Self {
            config,
            limit: ceiling as f64,
            ceiling: ceiling as f64,
            ended: 0,
            queued: 0,
            preemptions: None,
            last_cut_s: None,
            last_preemption_cut_s: None,
            cuts: 0,
            growths: 0,
        }
    }

    /// Maximum number of episodes that may hold KV capacity.
    pub(super) fn limit(&self) -> usize {
        self.limit.max(1.0) as usize
    }

    /// Counts an ended episode.
    pub(super) fn episode_ended(&mut self) {
        self.ended += 1;
    }

    /// Handles a reading of the engine at `now_s`, while `active` episodes hold KV capacity.
    pub(super) fn read(&mut self, status: &EngineStatus, active: usize, now_s: f64) {
        let c = self.config;
        let used = kv_use(status);
        // Capacity that was just freed still shows in the status.
        let active = active.max(status.running + status.waiting);
        let before = self.preemptions.replace(status.preemptions);
        let preempted = before.is_some_and(|before| status.preemptions > before);
        let queueing = status.waiting as f64 > c.queue_ratio * status.running as f64
            && used.is_none_or(|u| u >= c.grow_below)
            && status.waiting > 0;
        self.queued = if queueing { self.queued + 1 } else { 0 };
        let since = |at: Option<f64>| at.map_or(f64::INFINITY, |at| now_s - at);
        let settled = since(self.last_cut_s) >= c.settle_s;
        if preempted && settled {
            let again = since(self.last_preemption_cut_s) < c.gate_s;
            self.last_preemption_cut_s = Some(now_s);
            let cut = if again {
                c.escalated_cut
            } else {
                c.preemption_cut
            };
            self.cut(active, cut, now_s);
        } else if let Some(used) = used
            && (used > c.stop_above || (used > c.trim_above && settled))
        {
            self.cut(active, c.target / used, now_s);
        } else if self.queued >= c.queue_readings && settled {
            self.queued = 0;
            self.cut(active, c.queue_cut, now_s);
        } else if self.ended as f64 >= self.limit
            && active as f64 >= c.binding * self.limit() as f64
            && used.is_none_or(|u| u < c.grow_below)
            && since(self.last_cut_s) >= c.gate_s
        {
            self.ended = 0;
            if self.limit < self.ceiling {
                self.limit = (self.limit * c.growth).max(self.limit + 1.0);
                self.limit = self.limit.min(self.ceiling);
                self.growths += 1;
            }
        }
    }

    /// Sets the limit to `factor` times the episodes that hold capacity, and never above its present value.
    fn cut(&mut self, active: usize, factor: f64, now_s: f64) {
        let base = self.limit.min(active as f64);
        let limit = (base * factor).max(1.0);
        if limit < self.limit {
            self.limit = limit;
            self.ended = 0;
            self.cuts += 1;
            self.last_cut_s = Some(now_s);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(used: usize, running: usize, waiting: usize, preemptions: u64) -> EngineStatus {
        EngineStatus {
            running,
            waiting,
            kv_tokens_total: 1000,
            kv_tokens_free: 1000 - used,
            preemptions,
            ..EngineStatus::default()
        }
    }

    fn pressure(ceiling: usize) -> Pressure {
        Pressure::new(PressureConfig::default(), ceiling)
    }

    #[test]
    fn an_engine_with_room_is_never_held_back() {
        let mut p = pressure(64);
        for i in 0..100 {
            // A queue that waits for computation, not for KV capacity.
            p.read(&status(500, 8, 56, 0), 64, f64::from(i) * 0.25);
            p.episode_ended();
        }
        assert_eq!((p.limit(), p.cuts, p.growths), (64, 0, 0));
    }

    #[test]
    fn preemptions_cut_by_a_fifth_and_soon_again_by_half() {
        let mut p = pressure(100);
        p.read(&status(700, 90, 0, 3), 100, 0.0);
        assert_eq!(
            p.limit(),
            100,
            "what was before the first look does not count"
        );
        p.read(&status(700, 90, 0, 4), 100, 2.0);
        assert_eq!(p.limit(), 80);
        p.read(&status(700, 90, 0, 9), 80, 2.25);
        assert_eq!(p.limit(), 80, "the cut has not shown yet");
        p.read(&status(700, 90, 0, 10), 80, 4.0);
        assert_eq!(p.limit(), 40);
        p.read(&status(700, 90, 0, 11), 40, 30.0);
        assert_eq!(p.limit(), 32, "long after, by a fifth");
        assert_eq!(p.cuts, 3);
    }

    #[test]
    fn a_full_engine_is_trimmed_to_its_target_at_once() {
        let mut p = pressure(100);
        p.read(&status(850, 100, 0, 0), 100, 10.0);
        assert_eq!(p.limit(), 82);
        p.read(&status(850, 82, 0, 0), 82, 10.25);
        assert_eq!(p.limit(), 82, "the soft limit waits for the cut to show");
        p.read(&status(1000, 82, 0, 0), 82, 10.5);
        assert_eq!(p.limit(), 57);
    }

    #[test]
    fn a_full_engine_is_judged_by_what_it_runs_not_by_what_has_just_ended() {
        let mut p = pressure(100);
        p.read(&status(1000, 80, 0, 0), 3, 0.0);
        assert_eq!(p.limit(), 56);
    }

    #[test]
    fn queueing_for_room_cuts_after_six_readings() {
        let mut p = pressure(100);
        for i in 1..=6 {
            assert_eq!(p.limit(), 100);
            p.read(&status(700, 50, 30, 0), 100, f64::from(i));
        }
        assert_eq!(p.limit(), 90);
    }

    #[test]
    fn it_grows_back_by_a_quarter_each_turnover_when_bound_and_calm() {
        let mut p = pressure(100);
        p.read(&status(0, 0, 0, 0), 100, 0.0);
        p.read(&status(0, 0, 0, 1), 100, 1.0);
        let turnover = |p: &mut Pressure, used, active, now| {
            for _ in 0..p.limit() {
                p.episode_ended();
            }
            p.read(&status(used, 0, 0, 1), active, now);
            p.limit()
        };
        assert_eq!(turnover(&mut p, 100, 80, 10.0), 80, "within the gate");
        assert_eq!(turnover(&mut p, 650, 80, 20.0), 80, "too full");
        assert_eq!(turnover(&mut p, 100, 40, 21.0), 80, "not bound");
        assert_eq!(turnover(&mut p, 100, 80, 22.0), 100);
        assert_eq!(turnover(&mut p, 100, 100, 40.0), 100, "its ceiling");
    }

    #[test]
    fn one_episode_is_always_allowed_and_the_limit_leaves_it() {
        let mut p = pressure(2);
        p.read(&status(950, 1, 0, 0), 2, 0.0);
        p.read(&status(1000, 1, 0, 0), 1, 5.0);
        assert_eq!(p.limit(), 1);
        for _ in 0..3 {
            p.episode_ended();
        }
        p.read(&status(0, 0, 0, 0), 1, 60.0);
        assert_eq!(p.limit(), 2);
    }
}
