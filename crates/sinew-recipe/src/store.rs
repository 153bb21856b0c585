//! `[store]`: where traces are kept.

use crate::RunPlan;
use crate::rule::Rules;
use crate::section::{choice, section};
use sinew_types::holds_password;

choice! {
    /// The place of traces.
    StoreKind {
        /// In the run's folder; survives the process.
        Disk = "disk",
        /// In memory, up to 4 GiB; gone with the process.
        Memory = "memory",
        /// In PostgreSQL, for runs whose processes are on several hosts.
        Postgres = "postgres",
    }
}

section! {
    /// The place of traces.
    StoreKeys => StorePlan, "store" {
        /// The place of traces.
        kind as "type": StoreKind = StoreKind::Disk;
        /// Address of the database, `postgres://USER@HOST/DATABASE`, without a password: that comes from the
        /// environment variable `PGPASSWORD`. Only with `type = "postgres"`, like the keys below.
        url: String;
        /// File whose first line is the address, which may contain a password there. In the place of `url`.
        url_file: String;
        /// Name of the store in the database, 1 to 48 letters, digits, `-` and `_`. Left out: the name of the
        /// run's folder.
        name: String;
        /// Place of the traces themselves, `s3://BUCKET/PREFIX` or `file:///FOLDER`; keys of S3 come from the
        /// environment variables `AWS_*`. Left out: the database.
        payloads: String;
    }
}

impl StoreKind {
    /// Whether what is stored outlives the process.
    pub fn is_durable(self) -> bool {
        match self {
            Self::Disk | Self::Postgres => true,
            Self::Memory => false,
        }
    }
}

/// An address in a message, without its password.
pub(crate) fn shown(url: &str) -> String {
    if holds_password(url) {
        "an address with a password".into()
    } else {
        format!("{url:?}")
    }
}

/// Requires a store that outlives the process, for the reason `why`.
pub(crate) fn needs_durable(plan: &RunPlan, why: &str, rules: &mut Rules) {
    let kind = plan.store.kind;
    let reason = format!("{why}: use \"disk\" or \"postgres\"");
    let shown = format!("{:?}", kind.name());
    rules.custom("store.type", shown, reason, kind.is_durable());
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let store = &plan.store;
    let postgres = store.kind == StoreKind::Postgres;
    for key in ["url", "url_file", "name", "payloads"] {
        let reason = "has no effect without store.type = \"postgres\"; remove it, or set that";
        rules.unused(&format!("store.{key}"), reason, postgres);
    }
    if !postgres {
        return;
    }
    rules.custom(
        "store.type",
        "\"postgres\"",
        "needs store.url or store.url_file, one of them",
        store.url.is_some() != store.url_file.is_some(),
    );
    let url = store.url.as_deref().unwrap_or("postgres://");
    rules.custom(
        "store.url",
        "an address with a password",
        "copies of a recipe are shown: give the password as PGPASSWORD, or the address as store.url_file",
        !holds_password(url),
    );
    rules.allowed(
        "store.url",
        "an address",
        "postgres://USER@HOST/DATABASE",
        url.starts_with("postgres://") || url.starts_with("postgresql://"),
    );
    let name = store.name.as_deref().unwrap_or("run");
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    rules.allowed(
        "store.name",
        format!("{name:?}"),
        "1 to 48 letters, digits, - and _",
        (1..=48).contains(&name.len()) && name.chars().all(fits),
    );
    let place = store.payloads.as_deref().unwrap_or("file:///");
    rules.custom(
        "store.payloads",
        "an address with keys",
        "copies of a recipe are shown: keys of S3 are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        place.starts_with("file://") || !holds_password(place),
    );
    rules.allowed(
        "store.payloads",
        shown(place),
        "s3://BUCKET/PREFIX or file:///FOLDER",
        place.starts_with("file:///") || place.len() > 5 && place.starts_with("s3://"),
    );
}
