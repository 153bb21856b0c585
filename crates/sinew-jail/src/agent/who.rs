//! Users of a root that programs can change: whom a name of the image means.
//!
//! `/etc/passwd` and `/etc/group` are read anew for each name, since programs add users. Both are hostile:
//! they are read up to a bound, no pipe or device holds the agent up, and a user that they name has no more
//! rights than the sandbox.

use rustix::fs::{OFlags, ResolveFlags};
use std::ffi::CStr;
use std::fs::File;
use std::io::{Error, Read, Result};

/// Bytes of a file with users or groups that are read.
const MAX_BYTES: u64 = 1 << 20;
/// Most further groups of a user, as the kernel takes them (NGROUPS_MAX).
const MAX_GROUPS: usize = 65_536;

/// A user, its groups and its home.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct User {
    pub(super) user: u32,
    pub(super) group: u32,
    /// Further groups.
    pub(super) groups: Vec<u32>,
    pub(super) home: Vec<u8>,
}

/// The user of a name or number, or of a pair `USER:GROUP`.
///
/// # Errors
/// ENOENT if there is no such user or group, EINVAL if the text makes no sense.
pub(super) fn user(text: &[u8]) -> Result<User> {
    find(text, &read(c"/etc/passwd"), &read(c"/etc/group"))
}

/// Content of a file of the root; empty if it is missing or cannot be read.
fn read(path: &CStr) -> Vec<u8> {
    let open = || -> Result<Vec<u8>> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
        // NONBLOCK: a pipe of that name must not hold the agent.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let root = super::files::top(c"/")?;
        let file = rustix::fs::openat2(root, path, flags, rustix::fs::Mode::empty(), resolve)?;
        let file = File::from(file);
        if !file.metadata()?.is_file() {
            return Err(Error::from_raw_os_error(libc::EINVAL));
        }
        let mut bytes = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    open().unwrap_or_default()
}

/// Fields of the lines of a file with users or groups.
fn lines(file: &[u8]) -> impl Iterator<Item = Vec<&[u8]>> {
    let lines = file.split(|&b| b == b'\n');
    lines.map(|line| line.split(|&b| b == b':').collect())
}

/// A number in decimal digits.
fn number(text: &[u8]) -> Option<u32> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(text).ok().filter(|_| digits)?;
    // The last number means no user to the kernel.
    text.parse().ok().filter(|n| *n != u32::MAX)
}

/// Finds a user in the content of both files.
fn find(text: &[u8], passwd: &[u8], group: &[u8]) -> Result<User> {
    let errno = Error::from_raw_os_error;
    let (name, group_name) = match text.iter().position(|&b| b == b':') {
        Some(at) => (&text[..at], Some(&text[at + 1..])),
        None => (text, None),
    };
    if name.is_empty() {
        return Err(errno(libc::EINVAL));
    }
    let id = number(name);
    let same = |line: &Vec<&[u8]>| match id {
        Some(id) => line.get(2).copied().and_then(number) == Some(id),
        None => line.first() == Some(&name),
    };
    let entry = lines(passwd).filter(|line| line.len() >= 6).find(same);
    let of_entry = |field: usize| entry.as_ref().and_then(|line| number(line[field]));
    let known_root = (name == b"root").then_some(0);
    let user = id.or_else(|| of_entry(2)).or(known_root);
    let user = user.ok_or_else(|| errno(libc::ENOENT))?;
    let home = match &entry {
        Some(line) if line[5].starts_with(b"/") => line[5].to_vec(),
        None if user == 0 => b"/root".to_vec(),
        _ => b"/".to_vec(),
    };
    let (group, groups) = match group_name {
        Some(chosen) => {
            let named = || lines(group).find(|line| line.len() >= 3 && line[0] == chosen);
            let id = number(chosen).or_else(|| named().and_then(|line| number(line[2])));
            (id.ok_or_else(|| errno(libc::ENOENT))?, Vec::new())
        }
        None => {
            let login = entry.as_ref().map_or(name, |line| line[0]);
            (of_entry(3).unwrap_or(0), member_of(login, group))
        }
    };
    Ok(User {
        user,
        group,
        groups,
        home,
    })
}

/// Groups that list a user as a member.
fn member_of(user: &[u8], group: &[u8]) -> Vec<u32> {
    let lists = |line: &Vec<&[u8]>| {
        let members = line.get(3).copied().unwrap_or_default();
        line.len() >= 4 && members.split(|&b| b == b',').any(|member| member == user)
    };
    let lines = lines(group).filter(lists);
    lines
        .filter_map(|line| number(line[2]))
        .take(MAX_GROUPS)
        .collect()
}

/// `more` after `base`, both `NAME=value`: a later value of a name replaces an earlier one, since programs
/// differ in which of two they take.
pub(super) fn merged(base: &[Vec<u8>], more: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut seen = std::collections::HashSet::new();
    let mut kept: Vec<Vec<u8>> = Vec::new();
    for variable in base.iter().chain(more).rev() {
        let end = variable.iter().position(|&b| b == b'=');
        if seen.insert(&variable[..end.unwrap_or(variable.len())]) {
            kept.push(variable.clone());
        }
    }
    kept.reverse();
    kept
}

/// Whether this process is root of a user namespace only: then its numbers mean other users outside.
pub(super) fn in_user_namespace() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let all: Vec<&str> = map.split_whitespace().collect();
    !all.is_empty() && all != ["0", "0", "4294967295"]
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/bash\n\
        broken\n\
        agent:x:1000:1001:,,,:/home/agent:/bin/sh\n\
        odd:x:1002:7:::/bin/sh\n";
    const GROUP: &[u8] =
        b"root:x:0:\nagent:x:1001:\naudio:x:29:root,agent\nstaff:x:50:agent\nbad:x::agent\n";

    fn found(text: &str) -> (u32, u32, Vec<u32>, String) {
        let user = find(text.as_bytes(), PASSWD, GROUP).unwrap();
        let home = String::from_utf8(user.home).unwrap();
        (user.user, user.group, user.groups, home)
    }

    #[test]
    fn users_are_found_by_name_number_and_group() {
        let agent = (1000, 1001, vec![29, 50], "/home/agent".into());
        assert_eq!(found("agent"), agent);
        assert_eq!(found("1000"), agent);
        assert_eq!(found("root"), (0, 0, vec![29], "/root".into()));
        assert_eq!(found("5"), (5, 0, vec![], "/".into()));
        assert_eq!(found("5:6"), (5, 6, vec![], "/".into()));
        let chosen = (1000, 50, vec![], "/home/agent".into());
        assert_eq!(found("agent:staff"), chosen);
        assert_eq!(found("odd"), (1002, 7, vec![], "/".into()));
    }

    #[test]
    fn nobody_is_made_up() {
        for text in [
            "",
            ":0",
            "nobody",
            "agent:none",
            "agent:",
            "4294967295",
            "broken",
        ] {
            assert!(find(text.as_bytes(), PASSWD, GROUP).is_err(), "{text}");
        }
        let root = find(b"root", b"", b"").unwrap();
        assert_eq!((root.user, root.home.as_slice()), (0, &b"/root"[..]));
    }

    #[test]
    fn a_later_variable_replaces_an_earlier_one() {
        let list = |texts: &[&str]| {
            texts
                .iter()
                .map(|t| t.as_bytes().to_vec())
                .collect::<Vec<_>>()
        };
        let base = list(&["PATH=/bin", "HOME=/", "A=1"]);
        let more = list(&["PATH=/opt:/bin", "B", "A="]);
        let expected = list(&["HOME=/", "PATH=/opt:/bin", "B", "A="]);
        assert_eq!(merged(&base, &more), expected);
    }
}
