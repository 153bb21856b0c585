//! TLS of listeners, and the authorities that clients trust: the same options in every command.
//!
//! | listener | without options |
//! |---|---|
//! | on the loopback address | plain HTTP |
//! | that other hosts reach, of a run | TLS with the authority in `RUN/tls`, which is made |
//! | that other hosts reach, of another command | refused |

use crate::failure::Failure;
use clap::Args;
use sinew_http::server::Endpoint;
use sinew_http::{Authorities, HOST_TIME, TlsError, TlsIdentity, own_ca};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Variable with the file of authorities, where `--tls-ca` is not given.
pub(crate) const CA_VARIABLE: &str = "SINEW_TLS_CA";
/// File of the kernel with the name of this host.
const HOST_NAME_FILE: &str = "/proc/sys/kernel/hostname";
/// An address of no host (RFC 5737): the system names its own address on the way there, and sends nothing.
const ELSEWHERE: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 1), 9);

/// TLS of the listeners of a command.
#[derive(Clone, Debug, Default, Args)]
pub struct TlsArgs {
    /// Certificate of the listener as PEM, with those between it and its authority
    #[arg(
        long,
        value_name = "FILE",
        requires = "tls_key",
        conflicts_with_all = ["tls_own", "insecure_plain_http"]
    )]
    tls_cert: Option<PathBuf>,
    /// Key of --tls-cert as PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Folder of an own authority, made at the first start, that signs a certificate for the listener:
    /// clients trust DIR/ca.pem (--tls-ca)
    #[arg(long, value_name = "DIR", conflicts_with = "insecure_plain_http")]
    tls_own: Option<PathBuf>,
    /// Another name or address at which clients reach the listener, for the certificate of an own authority;
    /// may be given several times
    #[arg(long, value_name = "NAME", conflicts_with_all = ["tls_cert", "insecure_plain_http"])]
    tls_host: Vec<String>,
    /// Let other hosts reach the listener without TLS, where something in front of it encrypts, such as a
    /// service mesh
    #[arg(long)]
    insecure_plain_http: bool,
}

impl TlsArgs {
    /// The endpoint of a listener. `option` names the address on the command line. A listener that other
    /// hosts reach has TLS, or is refused.
    ///
    /// # Errors
    /// If other hosts can reach the address and neither TLS nor plain HTTP is asked for, or a certificate
    /// cannot be read or made.
    pub fn endpoint(&self, option: &str, address: SocketAddr) -> Result<Endpoint, Failure> {
        let tls = self.identity(address)?;
        if tls.is_none() && !address.ip().is_loopback() && !self.insecure_plain_http {
            return Err(Failure::input(format!(
                "{option} {address}: other hosts can reach it, so it needs TLS\n  \
                 hint: --tls-own DIR makes an authority of your own; --tls-cert and --tls-key take files; \
                 --insecure-plain-http is for listeners behind something that encrypts"
            )));
        }
        Ok(Endpoint { address, tls })
    }

    /// Same as [`TlsArgs::endpoint`], for a listener of a run: one that other hosts reach gets the authority
    /// of `RUN/tls`, where nothing else is asked for.
    ///
    /// # Errors
    /// Those of [`TlsArgs::endpoint`].
    pub fn endpoint_of_run(
        &self,
        option: &str,
        address: SocketAddr,
        run: &Path,
    ) -> Result<Endpoint, Failure> {
        let given = self.tls_cert.is_some() || self.tls_own.is_some() || self.insecure_plain_http;
        if given || address.ip().is_loopback() {
            return self.endpoint(option, address);
        }
        let own = Self {
            tls_own: Some(run.join("tls")),
            ..self.clone()
        };
        own.endpoint(option, address)
    }

    /// Certificate and key of a listener, if it has TLS.
    fn identity(&self, address: SocketAddr) -> Result<Option<TlsIdentity>, Failure> {
        if let (Some(certificate), Some(key)) = (&self.tls_cert, &self.tls_key) {
            let read = TlsIdentity::from_files(certificate, key);
            let read = read.map_err(|e| Failure::input(format!("--tls-cert, --tls-key: {e}")))?;
            return Ok(Some(read));
        }
        let Some(folder) = &self.tls_own else {
            if let Some(name) = self.tls_host.first() {
                return Err(Failure::input(format!(
                    "--tls-host {name}: it has no effect without --tls-own"
                )));
            }
            return Ok(None);
        };
        let failed = |e: TlsError| Failure::input(format!("--tls-own {}: {e}", folder.display()));
        let issued = own_ca(folder).and_then(|ca| ca.issue(&self.names(address), HOST_TIME));
        let identity = issued.and_then(|issued| issued.identity());
        identity.map(Some).map_err(failed)
    }

    /// Names and addresses at which clients reach a listener.
    fn names(&self, address: SocketAddr) -> Vec<String> {
        let mut names: Vec<String> = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).into();
        if address.ip().is_unspecified() {
            names.extend(own_address().map(|ip| ip.to_string()));
        } else {
            names.push(address.ip().to_string());
        }
        if !address.ip().is_loopback() {
            let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
            names.extend(host_name().filter(|host| host.chars().all(plain)));
        }
        names.extend(self.tls_host.iter().cloned());
        let mut seen = std::collections::HashSet::new();
        names.retain(|name| seen.insert(name.clone()));
        names
    }

    /// The options as they were typed, each after a space.
    pub fn typed(&self) -> String {
        let path = |p: &Option<PathBuf>| p.as_ref().map(|p| p.display().to_string());
        let mut all: Vec<String> = [
            ("cert", path(&self.tls_cert)),
            ("key", path(&self.tls_key)),
            ("own", path(&self.tls_own)),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some(format!(" --tls-{name} {}", value?)))
        .collect();
        all.extend(
            self.tls_host
                .iter()
                .map(|name| format!(" --tls-host {name}")),
        );
        if self.insecure_plain_http {
            all.push(" --insecure-plain-http".to_owned());
        }
        all.concat()
    }
}

/// Name of this host, if it has one.
#[must_use]
pub fn host_name() -> Option<String> {
    let name = std::fs::read_to_string(HOST_NAME_FILE).ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// The address of this host on the way to other ones.
fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect(ELSEWHERE).ok()?;
    let own = socket.local_addr().ok()?.ip();
    (!own.is_unspecified()).then_some(own)
}

/// Other hosts reach a listener at this address. A listener on all addresses has that of this host.
pub fn reached_at(bound: SocketAddr) -> SocketAddr {
    match own_address() {
        Some(own) if bound.ip().is_unspecified() => SocketAddr::new(own, bound.port()),
        _ => bound,
    }
}

/// Files of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// Certificate of the authority, which clients trust.
    pub authority: PathBuf,
    /// Certificate of the host.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// Makes a key and a certificate for a host, signed by the authority of a folder, and writes them there under
/// the first of its names.
///
/// # Errors
/// If the folder cannot be used, or a name cannot be in a certificate.
pub fn host_certificate(
    folder: &Path,
    names: &[String],
    days: u64,
) -> Result<CertificateFiles, Failure> {
    let made = || -> Result<CertificateFiles, TlsError> {
        let ca = own_ca(folder)?;
        let issued = ca.issue(names, Duration::from_secs(days * 86_400))?;
        let first = names.first().map_or("host", String::as_str);
        // An address has colons, and a name may begin with a star.
        let plain = |c: char| {
            if c.is_ascii_alphanumeric() || c == '.' {
                c
            } else {
                '-'
            }
        };
        let (certificate, key) = issued.write(
            folder,
            &format!("host-{}", first.chars().map(plain).collect::<String>()),
        )?;
        Ok(CertificateFiles {
            authority: ca.file(),
            certificate,
            key,
        })
    };
    made().map_err(Failure::input)
}

/// Makes all clients of this process trust the authorities of a file, or of the one that `SINEW_TLS_CA`
/// names, in addition to Mozilla's.
///
/// # Errors
/// If the file cannot be read, or holds other things than certificates of authorities.
pub fn trust_authorities(file: Option<&Path>) -> Result<(), Failure> {
    let (name, file) = match (file, std::env::var_os(CA_VARIABLE)) {
        (Some(file), _) => ("--tls-ca", file.to_owned()),
        (None, Some(file)) if !file.is_empty() => (CA_VARIABLE, PathBuf::from(file)),
        _ => return Ok(()),
    };
    let trusted = Authorities::from_file(&file).and_then(sinew_http::trust);
    trusted.map_err(|e| Failure::input(format!("{name}: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn other_hosts_reach_no_plain_listener_unless_asked() {
        let none = TlsArgs::default();
        assert!(none.endpoint("--listen", address("127.0.0.1:0")).is_ok());
        assert!(none.endpoint("--listen", address("[::1]:0")).is_ok());
        for at in ["0.0.0.0:80", "10.0.0.7:80", "[::]:80"] {
            let refused = none.endpoint("--listen", address(at)).unwrap_err();
            let text = refused.text().to_owned();
            assert!(text.starts_with(&format!("--listen {at}: ")), "{text}");
            assert!(text.contains("--tls-own") && text.contains("--insecure-plain-http"));
        }
        let plain = TlsArgs {
            insecure_plain_http: true,
            ..TlsArgs::default()
        };
        let endpoint = plain.endpoint("--listen", address("0.0.0.0:80")).unwrap();
        assert_eq!(endpoint.scheme(), "http");
        assert_eq!(plain.typed(), " --insecure-plain-http");
    }

    #[test]
    fn a_listener_is_reached_where_it_listens() {
        let own = address("10.0.0.7:80");
        assert_eq!(reached_at(own), own);
        let all = reached_at(address("0.0.0.0:80"));
        // A host without any way to others has no address for them.
        assert!(all.port() == 80 && all.ip().is_unspecified() == own_address().is_none());
    }

    #[test]
    fn a_run_makes_its_authority_for_other_hosts_alone() {
        let run = tempfile::tempdir().unwrap();
        let args = TlsArgs {
            tls_host: vec!["sinew.example".into()],
            ..TlsArgs::default()
        };
        let names = args.names(address("10.0.0.7:80"));
        for name in ["localhost", "10.0.0.7", "sinew.example"] {
            assert!(names.iter().any(|n| n == name), "{names:?}");
        }
        let none = TlsArgs::default();
        let here = none.endpoint_of_run("--serve", address("127.0.0.1:0"), run.path());
        assert_eq!(here.unwrap().scheme(), "http");
        assert!(!run.path().join("tls").exists());
        let far = args.endpoint_of_run("--serve", address("10.0.0.7:80"), run.path());
        assert_eq!(far.unwrap().scheme(), "https");
        assert!(run.path().join("tls/ca.pem").exists());
        assert!(args.endpoint("--listen", address("127.0.0.1:0")).is_err());
    }
}
