//! An own certificate authority in a folder: `ca.key`, which never leaves it, and `ca.pem`, which clients
//! trust.
//!
//! The key is the only thing that counts. A certificate that is lost is made again from it, and clients that
//! have the old one trust the new one as well, since they compare name and key.

use crate::identity::TlsIdentity;
use crate::trust::{TlsError, failed, file};
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType, date_time_ymd,
};
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{fmt, io};

/// File with the key of the authority.
const KEY_FILE: &str = "ca.key";
/// File with the certificate of the authority.
const CERTIFICATE_FILE: &str = "ca.pem";
/// Seconds of a day.
const DAY_S: u64 = 86_400;
/// Time that the certificate of the authority is valid.
const AUTHORITY_TIME: Duration = Duration::from_secs(3650 * DAY_S);
/// Time that the certificate of a host is valid, unless asked otherwise.
pub const HOST_TIME: Duration = Duration::from_secs(825 * DAY_S);
/// Time before now from which certificates are valid: clocks of hosts differ.
const CLOCK_GAP: Duration = Duration::from_secs(2 * DAY_S);
/// Maximum number of names of a certificate.
const MAX_NAMES: usize = 64;

/// Numbers of temporary files of this process.
static NEXT_FILE: AtomicU64 = AtomicU64::new(0);

/// An own certificate authority.
pub struct OwnCa {
    folder: PathBuf,
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl fmt::Debug for OwnCa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnCa")
            .field("folder", &self.folder)
            .finish_non_exhaustive()
    }
}

/// Certificate and key of a host, as PEM.
#[derive(Clone)]
pub struct Issued {
    /// The certificate.
    pub certificate: String,
    /// Its key.
    key: String,
}

impl fmt::Debug for Issued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Issued").finish_non_exhaustive()
    }
}

/// Opens the authority of a folder. The first call makes it, with a key that only the own user can read; of
/// several processes that make it at the same time, all get the same one.
///
/// # Errors
/// [`TlsError`] if the folder cannot be read or written, or the key is none.
pub fn own_ca(folder: &Path) -> Result<OwnCa, TlsError> {
    std::fs::create_dir_all(folder).map_err(|e| failed(folder, &e))?;
    let path = folder.join(KEY_FILE);
    if !path.exists() {
        let key = KeyPair::generate().map_err(made)?;
        write(&path, key.serialize_pem().as_bytes(), 0o600, Replace::Never)?;
    }
    let text = String::from_utf8(file(&path)?).unwrap_or_default();
    let key = KeyPair::from_pem(&text).map_err(|e| TlsError::Pem {
        what: "key",
        why: format!("{}: {e}", path.display()),
    })?;
    let params = authority_params()?;
    let path = folder.join(CERTIFICATE_FILE);
    if !path.exists() {
        let certificate = params.self_signed(&key).map_err(made)?;
        write(&path, certificate.pem().as_bytes(), 0o644, Replace::Always)?;
    }
    let pem = String::from_utf8(file(&path)?).unwrap_or_default();
    Ok(OwnCa {
        folder: folder.to_owned(),
        issuer: Issuer::new(params, key),
        pem,
    })
}

impl OwnCa {
    /// The certificate that clients must trust, as PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// The file with the certificate that clients must trust.
    pub fn file(&self) -> PathBuf {
        self.folder.join(CERTIFICATE_FILE)
    }

    /// Makes a key and a certificate for the names and IP addresses of a host, valid for a time from now.
    /// Nothing is written.
    ///
    /// # Errors
    /// [`TlsError::Host`] without names, with more than 64, or for one that no certificate can have.
    pub fn issue(&self, hosts: &[String], time: Duration) -> Result<Issued, TlsError> {
        self.issue_until(hosts, SystemTime::now() + time)
    }

    /// Same as [`OwnCa::issue`], valid until a day.
    ///
    /// # Errors
    /// Those of [`OwnCa::issue`].
    pub fn issue_until(&self, hosts: &[String], until: SystemTime) -> Result<Issued, TlsError> {
        if hosts.is_empty() || hosts.len() > MAX_NAMES {
            return Err(TlsError::Host {
                name: hosts.first().cloned().unwrap_or_default(),
                why: format!("{} names are given, and 1 to {MAX_NAMES} fit", hosts.len()),
            });
        }
        let mut params = CertificateParams::default();
        params.distinguished_name = named(&hosts[0]);
        params.subject_alt_names = hosts.iter().map(|h| name(h)).collect::<Result<_, _>>()?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        (params.not_before, params.not_after) = {
            let from = SystemTime::now().min(until) - CLOCK_GAP;
            let ((y, m, d), (to_y, to_m, to_d)) = (date(from)?, date(until)?);
            (date_time_ymd(y, m, d), date_time_ymd(to_y, to_m, to_d))
        };
        let key = KeyPair::generate().map_err(made)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(made)?;
        Ok(Issued {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }
}

impl Issued {
    /// Certificate and key for a listener.
    ///
    /// # Errors
    /// [`TlsError::Identity`] if the library refuses them.
    pub fn identity(&self) -> Result<TlsIdentity, TlsError> {
        TlsIdentity::from_pem(self.certificate.as_bytes(), self.key.as_bytes())
    }

    /// Writes `NAME.pem` and `NAME.key`, which only the own user can read, and returns their paths.
    ///
    /// # Errors
    /// [`TlsError::File`] if one cannot be written.
    pub fn write(&self, folder: &Path, name: &str) -> Result<(PathBuf, PathBuf), TlsError> {
        let certificate = folder.join(format!("{name}.pem"));
        let key = folder.join(format!("{name}.key"));
        write(&key, self.key.as_bytes(), 0o600, Replace::Always)?;
        write(
            &certificate,
            self.certificate.as_bytes(),
            0o644,
            Replace::Always,
        )?;
        Ok((certificate, key))
    }
}

/// An error of the library that makes certificates.
fn made(error: rcgen::Error) -> TlsError {
    TlsError::Make(error.to_string())
}

/// The subject of a certificate.
fn named(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}

/// A name of a host in a certificate.
fn name(host: &str) -> Result<SanType, TlsError> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(SanType::IpAddress(address));
    }
    let wrong = |why: &str| TlsError::Host {
        name: host.to_owned(),
        why: why.to_owned(),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.' || c == '*';
    if host.is_empty() || host.len() > 253 || !host.chars().all(plain) {
        return Err(wrong(
            "it has other characters than a-z, 0-9, - and ., or is too long",
        ));
    }
    let named = Ia5String::try_from(host).map_err(|e| wrong(&e.to_string()))?;
    Ok(SanType::DnsName(named))
}

/// The parts of the authority's certificate that depend on nothing but the day.
fn authority_params() -> Result<CertificateParams, TlsError> {
    let now = SystemTime::now();
    let mut params = CertificateParams::default();
    params.distinguished_name = named("Sinew own authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let (y, m, d) = date(now - CLOCK_GAP)?;
    params.not_before = date_time_ymd(y, m, d);
    let (y, m, d) = date(now + AUTHORITY_TIME)?;
    params.not_after = date_time_ymd(y, m, d);
    Ok(params)
}

/// The day of a moment, in UTC.
fn date(at: SystemTime) -> Result<(i32, u8, u8), TlsError> {
    let wrong = || TlsError::Make("the clock of this host is before 1970 or after 9999".into());
    let since = at.duration_since(UNIX_EPOCH).map_err(|_| wrong())?;
    let days = since.as_secs() / DAY_S;
    if days > 2_932_896 {
        return Err(wrong());
    }
    // Years begin in March here, so that the day of a leap year is the last one.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let parts = (i32::try_from(year), u8::try_from(month), u8::try_from(day));
    match parts {
        (Ok(year), Ok(month), Ok(day)) => Ok((year, month, day)),
        _ => Err(wrong()),
    }
}

/// Treatment of a file that is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Replace {
    /// It stays.
    Never,
    /// It gets the new content, at once.
    Always,
}

/// Writes a file as a whole: another name first, then the right one.
fn write(path: &Path, content: &[u8], mode: u32, replace: Replace) -> Result<(), TlsError> {
    let number = NEXT_FILE.fetch_add(1, Ordering::Relaxed);
    let own = format!(".{}-{number}.new", std::process::id());
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(own);
    let temporary = PathBuf::from(temporary);
    let written = || -> io::Result<()> {
        // A file of a process that was killed may have the name.
        let _ = std::fs::remove_file(&temporary);
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        if replace == Replace::Always {
            return std::fs::rename(&temporary, path);
        }
        let linked = std::fs::hard_link(&temporary, path);
        std::fs::remove_file(&temporary)?;
        match linked {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        }
    };
    written().map_err(|e| failed(path, &e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn days_are_those_of_the_calendar() {
        let of = |day: u64| date(UNIX_EPOCH + Duration::from_secs(day * DAY_S + 1)).unwrap();
        assert_eq!(of(0), (1970, 1, 1));
        assert_eq!(of(59), (1970, 3, 1));
        assert_eq!(of(11_016), (2000, 2, 29));
        assert_eq!(of(11_017), (2000, 3, 1));
        assert_eq!(of(19_722), (2023, 12, 31));
        assert_eq!(of(47_541), (2100, 3, 1));
        assert!(date(UNIX_EPOCH - Duration::from_secs(1)).is_err());
    }

    #[test]
    fn an_authority_is_made_once_and_its_key_is_private() {
        let folder = tempfile::tempdir().unwrap();
        let first = own_ca(folder.path()).unwrap();
        let key = std::fs::read(folder.path().join(KEY_FILE)).unwrap();
        let mode = std::fs::metadata(folder.path().join(KEY_FILE)).unwrap();
        assert_eq!(mode.permissions().mode() & 0o777, 0o600);
        let second = own_ca(folder.path()).unwrap();
        assert_eq!(first.pem(), second.pem());
        assert_eq!(std::fs::read(folder.path().join(KEY_FILE)).unwrap(), key);
        // A lost certificate is made again from the key.
        std::fs::remove_file(folder.path().join(CERTIFICATE_FILE)).unwrap();
        own_ca(folder.path()).unwrap();
        assert_eq!(std::fs::read(folder.path().join(KEY_FILE)).unwrap(), key);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
        std::fs::write(folder.path().join(KEY_FILE), "no key").unwrap();
        let error = own_ca(folder.path()).unwrap_err().to_string();
        assert!(error.contains("ca.key"), "{error}");
    }

    #[test]
    fn names_that_no_certificate_can_have_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let ca = own_ca(folder.path()).unwrap();
        let issue = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
            ca.issue(&names, HOST_TIME)
        };
        assert!(issue(&["10.0.0.7", "::1", "host-7.example"]).is_ok());
        for wrong in [&[][..], &["a b"], &[""], &["é"], &["http://a"]] {
            let error = issue(wrong).unwrap_err();
            assert!(matches!(error, TlsError::Host { .. }), "{wrong:?}: {error}");
        }
        let issued = issue(&["a"]).unwrap();
        assert!(issued.identity().is_ok());
        let other = issue(&["a"]).unwrap();
        let mixed = TlsIdentity::from_pem(issued.certificate.as_bytes(), other.key.as_bytes());
        assert!(matches!(mixed, Err(TlsError::Identity(_))));
        assert!(!format!("{issued:?} {ca:?}").contains("PRIVATE"));
    }
}
