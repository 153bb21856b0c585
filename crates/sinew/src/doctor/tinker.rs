//! Rows of a Tinker service: its key, its models, one sampled token.

use super::row::{Mark, Row};
use sinew_tinker::client::{BaseModel, ServiceOptions, Trial, try_service};
use std::time::Duration;

/// Time in which the service must answer.
const ANSWER: Duration = Duration::from_secs(15);
/// Time that one token may take; the service may have to load the model.
const TOKEN: Duration = Duration::from_secs(40);
/// Models that are named.
const NAMED: usize = 8;
/// Row of the models.
const MODELS: &str = "models";
/// Row of the sampled token.
const SAMPLE: &str = "sample";

/// All rows. Those after the first need a service that answers.
pub(super) fn rows(name: &'static str, url: &str) -> Vec<Row> {
    let key = match sinew_assembly::service_key("--tinker", None) {
        Ok(key) => key,
        Err(e) => {
            return vec![Row::failed(
                Mark::Fail,
                "key",
                e.text(),
                "set TINKER_API_KEY",
            )];
        }
    };
    let options = ServiceOptions {
        timeout: TOKEN,
        ..ServiceOptions::new(url, key)
    };
    match try_service(&options, ANSWER) {
        Ok(trial) => of_trial(name, url, &trial),
        Err(e) => vec![Row::failed(
            Mark::Fail,
            name,
            &e.to_string(),
            "`sinew serve --tinker` serves models of this host",
        )],
    }
}

fn of_trial(name: &str, url: &str, trial: &Trial) -> Vec<Row> {
    let named: Vec<String> = trial.models.iter().take(NAMED).map(shown).collect();
    let more = if trial.models.len() > NAMED {
        "; ..."
    } else {
        ""
    };
    let models = if named.is_empty() {
        let hint = "configure a base model at the service";
        Row::new(Mark::Fail, MODELS, "it has none", hint)
    } else {
        Row::ok(MODELS, format!("{}{more}", named.join("; ")))
    };
    let sample = match &trial.sampled {
        Some((model, took)) => {
            let seconds = took.as_secs_f64();
            Row::ok(SAMPLE, format!("one token of {model} in {seconds:.2} s"))
        }
        None => {
            let hint = "recipes need a model that can be sampled";
            Row::new(Mark::Fail, SAMPLE, "no model can be sampled", hint)
        }
    };
    let service = Row::ok(name, format!("{url} answers, and takes the key"));
    vec![service, models, sample]
}

/// A model with its context and the use that it is not for.
fn shown(model: &BaseModel) -> String {
    let mut text = model.name.clone();
    if let Some(tokens) = model.context {
        text.push_str(&format!(", context {tokens}"));
    }
    if model.trainable == Some(false) {
        text.push_str(", not trained");
    }
    if model.sampleable == Some(false) {
        text.push_str(", not sampled");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_name_models_and_what_is_missing() {
        let model = BaseModel {
            name: "org/name".into(),
            context: Some(4096),
            trainable: Some(false),
            sampleable: None,
        };
        let trial = Trial {
            models: vec![model],
            sampled: Some(("org/name".into(), Duration::from_millis(30))),
        };
        let rows = of_trial("service", "http://a", &trial);
        let detail = |row: &Row| row.detail.clone();
        let details: Vec<String> = rows.iter().map(detail).collect();
        assert_eq!(
            details,
            [
                "http://a answers, and takes the key",
                "org/name, context 4096, not trained",
                "one token of org/name in 0.03 s",
            ]
        );
        let empty = Trial {
            models: Vec::new(),
            sampled: None,
        };
        let rows = of_trial("service", "http://a", &empty);
        let failed = rows.iter().filter(|row| row.mark == Mark::Fail);
        assert_eq!(failed.count(), 2);
    }
}
