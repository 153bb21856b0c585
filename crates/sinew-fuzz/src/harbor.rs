//! Files of Harbor's tasks, which come with data sets: keys, Dockerfiles, compose files.

use sinew_harbor::{Manifest, PlainImage, Service};
use std::path::{Component, Path};

/// Tables, keys and instructions.
pub(crate) const WORDS: &[&str] = &[
    "[environment]\n",
    "[verifier.environment]\n",
    "[[verifier.collect]]\n",
    "[[steps]]\n",
    "[[environment.mcp_servers]]\n",
    "transport = \"stdio\"\n",
    "timeout_sec = 1e300\n",
    "network_mode = \"allowlist\"\n",
    "allowed_hosts = [\"*.a\"]\n",
    "memory = \"9G\"\n",
    "min_reward = { a = nan }\n",
    "artifacts = [\"..\"]\n",
    "FROM a\n",
    "WORKDIR /app\n",
    "COPY ../x .\n",
    "ENV A=1 B=2\n",
    "\\\n",
    "services:\n",
    "  main:\n",
    "    build: .\n",
    "${A:-b}",
];

/// One text as each of the files. Keys have times that a clock can wait for; copies stay in their folders.
pub(crate) fn harbor(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match Manifest::parse(Path::new("task.toml"), &text) {
        Err(refused) => assert!(!refused.to_string().is_empty()),
        Ok(manifest) => {
            let steps = manifest.steps.iter().map(|step| step.agent.timeout_s);
            let times = steps.chain([manifest.agent.timeout_s, manifest.verifier.timeout_s]);
            assert!(times.flatten().all(|s| s > 0.0 && s <= 604_800.0));
            let mut sources = manifest.artifacts.iter().map(|a| &a.source);
            assert!(sources.all(|source| source.split('/').all(|part| part != "..")));
        }
    }
    if let Ok(image) = PlainImage::parse(&text) {
        let inside = |path: &Path| path.components().all(|c| matches!(c, Component::Normal(_)));
        assert!(
            image
                .copies
                .iter()
                .all(|c| inside(&c.from) && inside(&c.to))
        );
    }
    if let Err(refused) = Service::parse(Path::new("docker-compose.yaml"), &text) {
        assert!(!refused.to_string().is_empty());
    }
}
