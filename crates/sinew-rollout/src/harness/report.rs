//! Turns the report of an agent that scores itself into the score of its episode.

use super::model_server::{AgentReport, ModelServer};
use serde_json::Value;
use sinew_types::{EpisodeId, Trace};

/// Passes an agent's own score to the server of its rollout. Returns the reason if the episode remains
/// without a score: an unreadable report does not count as 0.
pub(super) fn hand_over(
    server: &dyn ModelServer,
    episode: &EpisodeId,
    said: Option<&Value>,
) -> Option<String> {
    let Some(value) = said.filter(|v| v.is_object()) else {
        return Some("the agent said no reward of its own (harness.scored_by = \"agent\")".into());
    };
    let report = match AgentReport::of(value) {
        Ok(report) if report.is_scored() => report,
        Ok(_) => return Some("the agent's last words have no field `reward` or `rewards`".into()),
        Err(why) => return Some(why.to_string()),
    };
    let handed = server.score(episode, &report);
    let why = handed.err()?;
    Some(format!("the agent's own reward was refused: {why}"))
}

/// Records in an unscored trace why it has no score.
pub(super) fn explain(trace: &mut Trace, why: Option<String>) {
    if trace.outcome.unscored && trace.outcome.unscored_reason.is_none() {
        trace.outcome.unscored_reason = why;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_report_is_read_whole_or_refused() {
        let all = json!({"answer": "x", "reward": 1, "success": true, "rewards": [null, 0.5],
            "metrics": {"steps": 3}});
        let report = AgentReport::of(&all).unwrap();
        assert_eq!((report.reward, report.success), (Some(1.0), Some(true)));
        assert_eq!(report.rewards, [None, Some(0.5)]);
        assert!(report.is_scored());
        assert!(
            !AgentReport::of(&json!({"answer": "x"}))
                .unwrap()
                .is_scored()
        );
        for bad in [
            json!({"reward": "much"}),
            json!({"rewards": 3}),
            json!({"metrics": [1]}),
        ] {
            assert!(
                AgentReport::of(&bad)
                    .unwrap_err()
                    .to_string()
                    .contains("cannot be read"),
                "{bad}"
            );
        }
    }
}
