//! Arguments of the programs that build images. Pure: nothing is run here.

use super::{BuildError, BuildNetwork, BuildRequest};
use std::ffi::OsString;
use std::path::Path;
use std::str::FromStr;

/// Longest name of an image or a file.
const MAX_NAME: usize = 255;
/// Largest number of build arguments.
const MAX_ARGS: usize = 256;

/// A program that builds images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuilderKind {
    /// `podman`.
    Podman,
    /// `buildah`.
    Buildah,
    /// `docker`, with its daemon.
    Docker,
}

impl BuilderKind {
    /// All, in the order in which they are tried.
    pub const ALL: [Self; 3] = [Self::Podman, Self::Buildah, Self::Docker];

    /// Name of the program.
    pub fn name(self) -> &'static str {
        match self {
            Self::Podman => "podman",
            Self::Buildah => "buildah",
            Self::Docker => "docker",
        }
    }

    /// Arguments that succeed if it works here; Docker asks its daemon.
    pub(super) fn probe(self) -> Vec<OsString> {
        match self {
            Self::Podman | Self::Buildah => words(&["--version"]),
            Self::Docker => words(&["version", "--format", "{{.Server.Version}}"]),
        }
    }

    /// Arguments that print the id of an image, and fail if there is none of this name.
    pub(super) fn id(self, image: &str) -> Vec<OsString> {
        match self {
            Self::Podman | Self::Docker => {
                words(&["image", "inspect", "--format", "{{.Id}}", image])
            }
            Self::Buildah => words(&[
                "inspect",
                "--type",
                "image",
                "--format",
                "{{.FromImageID}}",
                image,
            ]),
        }
    }

    /// Arguments of a build under the name `tag`. Base images were found before, unless they may be fetched.
    ///
    /// # Errors
    /// [`BuildError::Request`] for Buildah without a network: its isolation, which needs no privileges, has
    /// that of the host.
    pub(super) fn build(
        self,
        request: &BuildRequest,
        tag: &str,
    ) -> Result<Vec<OsString>, BuildError> {
        let mut args = match self {
            Self::Podman | Self::Docker => words(&["build"]),
            Self::Buildah => words(&["bud", "--isolation=chroot"]),
        };
        let network = match (self, request.network) {
            (_, BuildNetwork::Host) => "--network=host",
            (Self::Podman | Self::Docker, BuildNetwork::None) => "--network=none",
            (Self::Buildah, BuildNetwork::None) => {
                return Err(BuildError::Request {
                    field: "network",
                    value: "none".into(),
                    allowed:
                        "buildah builds with the network of the host; use podman or docker, or \
                              allow the network"
                            .into(),
                });
            }
        };
        args.push(network.into());
        if self != Self::Docker && !request.pull {
            args.push("--pull-never".into());
        }
        for (name, value) in &request.args {
            args.extend(words(&["--build-arg", &format!("{name}={value}")]));
        }
        args.push("--file".into());
        args.push(request.context.join(&request.dockerfile).into());
        args.extend(words(&["--tag", tag]));
        args.push(request.context.clone().into());
        Ok(args)
    }

    /// Arguments that write an image to a new file.
    pub(super) fn save(self, image: &str, file: &Path) -> Vec<OsString> {
        let to = file.display().to_string();
        match self {
            Self::Podman => words(&["save", "--format", "docker-archive", "--output", &to, image]),
            Self::Docker => words(&["save", "--output", &to, image]),
            Self::Buildah => words(&["push", image, &format!("docker-archive:{to}:{image}")]),
        }
    }
}

impl FromStr for BuilderKind {
    type Err = BuildError;

    fn from_str(text: &str) -> Result<Self, BuildError> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| BuildError::Request {
            field: "builder",
            value: format!("{text:?}"),
            allowed: "podman, buildah or docker".into(),
        })
    }
}

fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

/// Refuses names that a program could take for an option or a transport.
pub(super) fn check_name(field: &'static str, name: &str) -> Result<(), BuildError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@".contains(c);
    let first = name
        .chars()
        .next()
        .is_some_and(|c| c.is_ascii_alphanumeric());
    if first && name.len() <= MAX_NAME && name.chars().all(plain) {
        return Ok(());
    }
    Err(BuildError::Request {
        field,
        value: format!("{name:?}"),
        allowed: format!(
            "1 to {MAX_NAME} of a-z, A-Z, 0-9, -, _, ., /, : and @, a letter or digit first"
        ),
    })
}

/// Refuses requests that make no sense.
pub(super) fn check(request: &BuildRequest) -> Result<(), BuildError> {
    if let Some(tag) = &request.tag {
        check_name("tag", tag)?;
    }
    let bad = |field, value: String, allowed: &str| {
        Err(BuildError::Request {
            field,
            value,
            allowed: allowed.into(),
        })
    };
    let path = Path::new(&request.dockerfile);
    let plain = |c: std::path::Component<'_>| matches!(c, std::path::Component::Normal(_));
    if request.dockerfile.is_empty() || !path.components().all(plain) {
        let allowed = "a path below the folder, such as Dockerfile";
        return bad("dockerfile", format!("{:?}", request.dockerfile), allowed);
    }
    if request.timeout.is_zero() {
        return bad("timeout", "0 s".into(), "at least 1 s");
    }
    if request.args.len() > MAX_ARGS {
        return bad("args", request.args.len().to_string(), "at most 256");
    }
    for (name, value) in &request.args {
        let letters = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if name.is_empty() || !name.chars().all(letters) || value.contains('\0') {
            let allowed = "NAME=VALUE, with a NAME of letters, digits and _";
            return bad("args", format!("{name:?}"), allowed);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(args: &[OsString]) -> String {
        let all: Vec<_> = args.iter().map(|a| a.to_string_lossy()).collect();
        all.join(" ")
    }

    fn request() -> BuildRequest {
        let mut request = BuildRequest::new(Path::new("/c"), Path::new("/cache"));
        request.args = vec![("A".into(), "b c".into())];
        request
    }

    #[test]
    fn each_builder_gets_its_own_arguments() {
        let built = |kind: BuilderKind| shown(&kind.build(&request(), "t").unwrap());
        let rest = "--build-arg A=b c --file /c/Dockerfile --tag t /c";
        assert_eq!(
            built(BuilderKind::Podman),
            format!("build --network=host --pull-never {rest}")
        );
        assert_eq!(
            built(BuilderKind::Buildah),
            format!("bud --isolation=chroot --network=host --pull-never {rest}")
        );
        assert_eq!(
            built(BuilderKind::Docker),
            format!("build --network=host {rest}")
        );
        let saved = |kind: BuilderKind| shown(&kind.save("i", Path::new("/f")));
        assert_eq!(saved(BuilderKind::Buildah), "push i docker-archive:/f:i");
        assert!(saved(BuilderKind::Podman).contains("--format docker-archive"));
        let alone = BuildRequest {
            network: BuildNetwork::None,
            ..request()
        };
        assert!(BuilderKind::Buildah.build(&alone, "t").is_err());
        let podman = BuilderKind::Podman.build(&alone, "t").unwrap();
        assert!(shown(&podman).contains("--network=none"));
    }

    #[test]
    fn names_cannot_become_options() {
        for name in [
            "",
            "-v",
            "--privileged",
            "a b",
            "a;b",
            "/x",
            &"a".repeat(256),
        ] {
            assert!(check_name("tag", name).is_err(), "{name}");
        }
        for name in ["a", "localhost/x:1", "docker.io/library/debian@sha256:00"] {
            check_name("tag", name).unwrap();
        }
        for kind in BuilderKind::ALL {
            assert_eq!(kind.name().parse::<BuilderKind>().unwrap(), kind);
        }
        assert!("kaniko".parse::<BuilderKind>().is_err());
    }

    #[test]
    fn wrong_requests_are_refused() {
        check(&request()).unwrap();
        for dockerfile in ["", "../x", "/etc/passwd"] {
            let wrong = BuildRequest {
                dockerfile: dockerfile.into(),
                ..request()
            };
            assert!(check(&wrong).is_err(), "{dockerfile}");
        }
        let wrong = BuildRequest {
            args: vec![("A B".into(), String::new())],
            ..request()
        };
        assert!(check(&wrong).is_err());
    }
}
