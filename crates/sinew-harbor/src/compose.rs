//! `docker-compose.yaml` of one service, as far as it says how its container is made.

use crate::error::{HarborError, SkipReason};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;
use std::path::Path;

/// Keys of a service that change nothing here: the container runs no program of its own.
const WITHOUT_EFFECT: [&str; 9] = [
    "cap_drop",
    "container_name",
    "deploy",
    "hostname",
    "init",
    "pull_policy",
    "restart",
    "stdin_open",
    "tty",
];

/// The container of the service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// Image; `None`: it is built.
    pub image: Option<String>,
    /// Folder of the build, relative to the file.
    pub context: String,
    /// File with the instructions, relative to that folder.
    pub dockerfile: String,
    /// Environment variables.
    pub env: BTreeMap<String, String>,
    /// Working folder.
    pub workdir: Option<String>,
}

#[derive(Deserialize)]
struct ComposeFile {
    services: BTreeMap<String, ServiceKeys>,
}

#[derive(Deserialize)]
struct ServiceKeys {
    image: Option<String>,
    build: Option<Build>,
    environment: Option<Variables>,
    working_dir: Option<String>,
    command: Option<Words>,
    volumes: Option<Vec<Mount>>,
    #[serde(flatten)]
    rest: BTreeMap<String, IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Build {
    Folder(String),
    Keys {
        context: Option<String>,
        dockerfile: Option<String>,
        #[serde(flatten)]
        rest: BTreeMap<String, IgnoredAny>,
    },
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Variables {
    Table(BTreeMap<String, Scalar>),
    List(Vec<String>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Scalar {
    Flag(bool),
    Number(f64),
    Text(String),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Words {
    Text(String),
    List(Vec<String>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Mount {
    Text(String),
    Keys {},
}

impl Service {
    /// Reads a file.
    ///
    /// # Errors
    /// If it is no compose file. A file that needs more than one plain service is the inner error.
    pub fn parse(path: &Path, text: &str) -> Result<Result<Self, SkipReason>, HarborError> {
        let file: ComposeFile = serde_saphyr::from_str(text).map_err(|e| HarborError::Format {
            path: path.into(),
            reason: e.to_string().lines().next().unwrap_or_default().to_owned(),
        })?;
        let names: Vec<String> = file.services.keys().cloned().collect();
        let mut services = file.services.into_values();
        match (services.next(), services.next()) {
            (Some(only), None) => Ok(service(only)),
            _ => Ok(Err(SkipReason::Services { names })),
        }
    }
}

fn service(keys: ServiceKeys) -> Result<Service, SkipReason> {
    let refused = |key: &str| SkipReason::Compose { key: key.into() };
    let other = |key: &&String| !WITHOUT_EFFECT.contains(&key.as_str());
    if let Some(key) = keys.rest.keys().find(other) {
        return Err(refused(key));
    }
    let waits = |text: &str| text.contains("sleep") || text.contains("tail -f");
    let command = keys.command.map(|words| match words {
        Words::Text(text) => text,
        Words::List(list) => list.join(" "),
    });
    if command.is_some_and(|command| !waits(&command)) {
        return Err(refused("command"));
    }
    // The folders of logs are there in any case.
    let logs = |mount: &Mount| matches!(mount, Mount::Text(text) if text.contains("LOGS_PATH"));
    if !keys.volumes.unwrap_or_default().iter().all(logs) {
        return Err(refused("volumes"));
    }
    let mut made = Service {
        image: keys.image.filter(|image| !image.contains("${")),
        context: ".".into(),
        dockerfile: "Dockerfile".into(),
        env: BTreeMap::new(),
        workdir: keys.working_dir,
    };
    match keys.build {
        None => {}
        Some(Build::Folder(folder)) => made.context = folder,
        Some(Build::Keys {
            context,
            dockerfile,
            rest,
        }) => {
            if let Some(key) = rest.keys().next() {
                return Err(refused(&format!("build.{key}")));
            }
            made.context = context.unwrap_or(made.context);
            made.dockerfile = dockerfile.unwrap_or(made.dockerfile);
        }
    }
    // The folder comes by a variable of the format's own programs.
    if made.context.contains("${") {
        made.context = ".".into();
    }
    made.env = environment(keys.environment).ok_or_else(|| refused("environment"))?;
    Ok(made)
}

/// Variables; `None`: one is taken from the environment of the host.
fn environment(keys: Option<Variables>) -> Option<BTreeMap<String, String>> {
    let scalar = |value: Scalar| match value {
        Scalar::Flag(flag) => flag.to_string(),
        Scalar::Number(number) => number.to_string(),
        Scalar::Text(text) => text,
    };
    let all: BTreeMap<String, String> = match keys {
        None => BTreeMap::new(),
        Some(Variables::Table(table)) => {
            let pairs = table.into_iter();
            pairs.map(|(name, value)| (name, scalar(value))).collect()
        }
        Some(Variables::List(list)) => {
            let pair = |text: String| {
                let (name, value) = text.split_once('=')?;
                Some((name.to_owned(), value.to_owned()))
            };
            list.into_iter().map(pair).collect::<Option<_>>()?
        }
    };
    let own = all.values().all(|value| !value.contains("${"));
    own.then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Service, SkipReason> {
        Service::parse(Path::new("docker-compose.yaml"), text).unwrap()
    }

    #[test]
    fn one_service_says_how_its_container_is_made() {
        let text = "services:\n  main:\n    build:\n      context: ${CONTEXT_DIR}\n      dockerfile: Other\n    \
                    image: ${MAIN_IMAGE_NAME}\n    command: [\"sh\", \"-c\", \"sleep infinity\"]\n    environment:\n      - A=1\n    \
                    volumes:\n      - ${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}\n    working_dir: /app\n";
        let service = of(text).unwrap();
        assert_eq!((service.image, service.context.as_str()), (None, "."));
        assert_eq!(service.dockerfile, "Other");
        assert_eq!(service.env["A"], "1");
        assert_eq!(service.workdir.as_deref(), Some("/app"));
        let service = of("services:\n  app:\n    image: debian:12\n").unwrap();
        assert_eq!(service.image.as_deref(), Some("debian:12"));
    }

    #[test]
    fn more_than_one_plain_service_is_a_reason_to_skip() {
        let several = "services:\n  main:\n    build: .\n  db:\n    image: postgres\n";
        let names = vec!["db".to_owned(), "main".to_owned()];
        assert_eq!(of(several), Err(SkipReason::Services { names }));
        for (line, key) in [
            ("privileged: true", "privileged"),
            ("volumes: [\"/:/host\"]", "volumes"),
            ("command: python server.py", "command"),
            ("environment: [SECRET]", "environment"),
            ("build: { context: ., args: { A: 1 } }", "build.args"),
        ] {
            let text = format!("services:\n  main:\n    {line}\n");
            assert_eq!(of(&text), Err(SkipReason::Compose { key: key.into() }));
        }
        assert!(Service::parse(Path::new("x"), "- 1\n").is_err());
    }
}
