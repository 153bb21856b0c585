//! `sinew tls`: certificates of an own authority, for hosts that do not have its key.

use crate::output;
use clap::Args;
use serde_json::json;
use sinew_assembly::Failure;
use std::path::PathBuf;

/// Maximum days that a certificate is valid.
const MAX_DAYS: u64 = 3650;

/// Arguments of `sinew tls`.
#[derive(Debug, Args)]
pub(crate) struct TlsCommandArgs {
    /// Folder of the authority, made if it is not there
    folder: PathBuf,
    /// Name or address at which clients reach the host; may be given several times. The first one names the
    /// files
    #[arg(long, required = true, value_name = "NAME")]
    host: Vec<String>,
    /// Days that the certificate is valid
    #[arg(long, default_value_t = 825, value_parser = clap::value_parser!(u64).range(1..=MAX_DAYS))]
    days: u64,
    /// JSON on standard output
    #[arg(long)]
    json: bool,
}

/// Makes a key and a certificate, and says where they are.
///
/// # Errors
/// If the folder cannot be used, or a name cannot be in a certificate.
pub(crate) fn run(args: &TlsCommandArgs) -> Result<(), Failure> {
    let made = sinew_assembly::host_certificate(&args.folder, &args.host, args.days)?;
    let (ca, certificate, key) = (
        made.authority.display(),
        made.certificate.display(),
        made.key.display(),
    );
    if args.json {
        output::print_json(&json!({
            "ca": made.authority, "certificate": made.certificate, "key": made.key,
        }));
    } else {
        output::print(&format!(
            "server: --tls-cert {certificate} --tls-key {key}\nclients: --tls-ca {ca}\n"
        ));
    }
    Ok(())
}
