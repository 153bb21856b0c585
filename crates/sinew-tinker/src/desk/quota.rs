//! Use by tenants, against their limits: pure, with time as an argument.

use super::config::{DeskLimits, TenantConfig, TenantLimits};
use super::journal::TenantUse;
use super::types::Refusal;
use std::collections::BTreeMap;
use std::time::Duration;

/// Milliseconds of a day.
const DAY_MS: u64 = 86_400_000;
/// Time after which a client tries again that waits for its own commands.
const SOON: Duration = Duration::from_secs(2);

/// The day of a time, counted since 1970 (UTC).
pub(super) fn day(now_ms: u64) -> u64 {
    now_ms / DAY_MS
}

/// Counters of all tenants.
#[derive(Clone, Debug)]
pub(super) struct Meter {
    default: TenantLimits,
    own: BTreeMap<String, TenantLimits>,
    uses: BTreeMap<String, TenantUse>,
    models: BTreeMap<String, u64>,
    day: u64,
    tokens: BTreeMap<String, u64>,
}

/// The refusal of a limit.
fn refused(
    limit: &'static str,
    tenant: &str,
    used: u64,
    allowed: u64,
    advice: &str,
    retry_after: Option<Duration>,
) -> Refusal {
    Refusal::Quota {
        limit,
        tenant: tenant.to_owned(),
        used,
        allowed,
        advice: advice.to_owned(),
        retry_after,
    }
}

impl Meter {
    /// Counters at 0.
    pub(super) fn new(limits: &DeskLimits, tenants: &[TenantConfig]) -> Self {
        let own = tenants.iter().filter_map(|tenant| {
            let limits = tenant.limits.clone()?;
            Some((tenant.name.clone(), limits))
        });
        Self {
            default: limits.tenant.clone(),
            own: own.collect(),
            uses: BTreeMap::new(),
            models: BTreeMap::new(),
            day: 0,
            tokens: BTreeMap::new(),
        }
    }

    /// Replaces the counters of commands by those of the journal.
    pub(super) fn set_uses(&mut self, uses: Vec<(String, TenantUse)>) {
        self.uses = uses.into_iter().collect();
    }

    /// Replaces the number of models.
    pub(super) fn set_models(&mut self, models: BTreeMap<String, u64>) {
        self.models = models;
    }

    /// Replaces the tokens of a day.
    pub(super) fn set_tokens(&mut self, day: u64, tokens: Vec<(String, u64)>) {
        self.day = day;
        self.tokens = tokens.into_iter().collect();
    }

    fn limits(&self, tenant: &str) -> &TenantLimits {
        self.own.get(tenant).unwrap_or(&self.default)
    }

    fn used(&self, tenant: &str) -> TenantUse {
        self.uses.get(tenant).copied().unwrap_or_default()
    }

    /// Checks a further model.
    ///
    /// # Errors
    /// If the tenant has as many as it may.
    pub(super) fn admit_model(&self, tenant: &str) -> Result<(), Refusal> {
        let used = self.models.get(tenant).copied().unwrap_or(0) + 1;
        let allowed = self.limits(tenant).models;
        if used <= allowed {
            return Ok(());
        }
        let advice = "end a session, or unload a model";
        Err(refused("models", tenant, used, allowed, advice, None))
    }

    /// Notes a further model.
    pub(super) fn add_model(&mut self, tenant: &str) {
        *self.models.entry(tenant.to_owned()).or_default() += 1;
    }

    /// Notes that a model ended.
    pub(super) fn drop_model(&mut self, tenant: &str) {
        if let Some(models) = self.models.get_mut(tenant) {
            *models = models.saturating_sub(1);
        }
    }

    /// Checks a command of `bytes`, and of so many `sequences` if it is a sample request.
    ///
    /// # Errors
    /// If a limit of the queue, of bytes or of the day's tokens is reached.
    pub(super) fn admit(
        &self,
        tenant: &str,
        bytes: u64,
        sequences: Option<u64>,
        now_ms: u64,
    ) -> Result<(), Refusal> {
        let (used, limits) = (self.used(tenant), self.limits(tenant));
        let soon = Some(SOON);
        let whole = used.bytes + bytes;
        if whole > limits.queued_bytes {
            let advice = "retrieve results, or send commands later";
            let (name, allowed) = ("queued_bytes", limits.queued_bytes);
            return Err(refused(name, tenant, whole, allowed, advice, soon));
        }
        match sequences {
            None if used.queued + 1 > limits.queued_commands => {
                let (queued, allowed) = (used.queued + 1, limits.queued_commands);
                let advice = "wait for results of earlier commands";
                let name = "queued_commands";
                return Err(refused(name, tenant, queued, allowed, advice, soon));
            }
            Some(more) if used.sequences + more > limits.samples_in_flight => {
                let (flying, allowed) = (used.sequences + more, limits.samples_in_flight);
                let fits_later = more <= allowed;
                let advice = if fits_later {
                    "wait for results of earlier requests"
                } else {
                    "ask for fewer samples at once"
                };
                let retry = soon.filter(|_| fits_later);
                let name = "samples_in_flight";
                return Err(refused(name, tenant, flying, allowed, advice, retry));
            }
            _ => {}
        }
        self.admit_tokens(tenant, now_ms)
    }

    /// Refuses work once the tokens of the day are used up. The command that reaches the limit still runs.
    fn admit_tokens(&self, tenant: &str, now_ms: u64) -> Result<(), Refusal> {
        let Some(allowed) = self.limits(tenant).tokens_per_day else {
            return Ok(());
        };
        let today = day(now_ms) == self.day;
        let used = self.tokens.get(tenant).copied().filter(|_| today);
        let used = used.unwrap_or(0);
        if used < allowed {
            return Ok(());
        }
        let left = Duration::from_millis(DAY_MS - now_ms % DAY_MS);
        let advice = "the count starts anew at midnight (UTC)";
        let name = "tokens_per_day";
        Err(refused(name, tenant, used, allowed, advice, Some(left)))
    }

    /// Checks a further checkpoint of about `bytes`, with `stored` bytes on disk.
    ///
    /// # Errors
    /// If it would exceed the tenant's limit.
    pub(super) fn admit_checkpoint(
        &self,
        tenant: &str,
        stored: u64,
        bytes: u64,
    ) -> Result<(), Refusal> {
        let (whole, allowed) = (stored + bytes, self.limits(tenant).checkpoint_bytes);
        if whole <= allowed {
            return Ok(());
        }
        let advice = "delete checkpoints, or give them a ttl";
        let name = "checkpoint_bytes";
        Err(refused(name, tenant, whole, allowed, advice, None))
    }

    /// Notes a command that waits.
    pub(super) fn enter(&mut self, tenant: &str, bytes: u64, sequences: Option<u64>) {
        let used = self.uses.entry(tenant.to_owned()).or_default();
        used.bytes += bytes;
        match sequences {
            Some(more) => used.sequences += more,
            None => used.queued += 1,
        }
    }

    /// Notes that a command ended, and how many bytes less (or, negative, more) the journal holds of it.
    pub(super) fn leave(&mut self, tenant: &str, freed: i64, sequences: Option<u64>) {
        let used = self.uses.entry(tenant.to_owned()).or_default();
        used.bytes = used.bytes.saturating_add_signed(freed.saturating_neg());
        match sequences {
            Some(less) => used.sequences = used.sequences.saturating_sub(less),
            None => used.queued = used.queued.saturating_sub(1),
        }
    }

    /// Notes that the journal holds so many bytes less of a tenant.
    pub(super) fn free(&mut self, tenant: &str, bytes: u64) {
        if let Some(used) = self.uses.get_mut(tenant) {
            used.bytes = used.bytes.saturating_sub(bytes);
        }
    }

    /// Notes computed tokens.
    pub(super) fn spend(&mut self, tenant: &str, tokens: u64, now_ms: u64) {
        if day(now_ms) != self.day {
            self.day = day(now_ms);
            self.tokens.clear();
        }
        *self.tokens.entry(tenant.to_owned()).or_default() += tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meter(limits: TenantLimits) -> Meter {
        let desk = DeskLimits {
            tenant: limits,
            ..DeskLimits::default()
        };
        Meter::new(&desk, &[])
    }

    fn limit(result: Result<(), Refusal>) -> Option<&'static str> {
        match result {
            Ok(()) => None,
            Err(Refusal::Quota { limit, .. }) => Some(limit),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn each_limit_is_named() {
        let mut meter = meter(TenantLimits {
            models: 1,
            queued_commands: 1,
            queued_bytes: 100,
            tokens_per_day: Some(10),
            checkpoint_bytes: 50,
            samples_in_flight: 4,
        });
        let now = 3 * DAY_MS + 5;
        assert_eq!(limit(meter.admit_model("ann")), None);
        meter.add_model("ann");
        assert_eq!(limit(meter.admit_model("ann")), Some("models"));
        assert_eq!(limit(meter.admit_model("bob")), None);
        assert_eq!(
            limit(meter.admit("ann", 101, None, now)),
            Some("queued_bytes")
        );
        meter.enter("ann", 40, None);
        let full = meter.admit("ann", 1, None, now);
        assert_eq!(limit(full), Some("queued_commands"));
        meter.leave("ann", 30, None);
        assert_eq!(limit(meter.admit("ann", 90, None, now)), None);
        let many = meter.admit("ann", 1, Some(5), now);
        assert!(matches!(
            &many,
            Err(Refusal::Quota {
                retry_after: None,
                ..
            })
        ));
        assert_eq!(limit(many), Some("samples_in_flight"));
        assert_eq!(
            limit(meter.admit_checkpoint("ann", 40, 11)),
            Some("checkpoint_bytes")
        );
        meter.spend("ann", 10, now);
        let spent = meter.admit("ann", 1, Some(1), now);
        let until = Duration::from_millis(DAY_MS - 5);
        assert!(
            matches!(&spent, Err(Refusal::Quota { retry_after: Some(left), .. }) if *left == until)
        );
        assert_eq!(limit(spent), Some("tokens_per_day"));
        assert_eq!(limit(meter.admit("ann", 1, Some(1), now + DAY_MS)), None);
    }

    #[test]
    fn results_count_until_they_are_gone() {
        let mut meter = meter(TenantLimits::default());
        meter.enter("ann", 100, Some(2));
        meter.leave("ann", -50, Some(2));
        let used = meter.used("ann");
        assert_eq!((used.bytes, used.sequences), (150, 0));
    }
}
