#!/bin/bash
# Builds kube-apiserver, kube-controller-manager and kube-scheduler 1.20.2 from Debian's source package into BIN, and puts
# Debian's etcd beside them.
#
#     build_control_plane.sh WORK BIN
#
# It needs Debian's packages and no other network, and changes nothing outside of its two folders: apt works with a
# configuration and lists of its own. From nothing it takes about 25 minutes of CPU and 3 GB of disk.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(realpath -m "$1")
bin=$(realpath -m "$2")
version=1.20.5+really1.20.2-1.1+deb12u1
# The version that the server claims: Helm and the operator ask for a recent one. The true one follows it.
claimed=v1.29.0-box.1.20.2

mkdir -p "$work"/apt/{lists/partial,archives/partial} "$work"/packages "$bin"
cd "$work"

cat >apt/sources.list <<LIST
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main
deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main
LIST
cat >apt/apt.conf <<CONF
Dir::State::lists "$work/apt/lists";
Dir::Cache "$work/apt";
Dir::Etc::sourcelist "$work/apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
APT::Sandbox::User "root";
CONF
export APT_CONFIG=$work/apt/apt.conf

echo "fetching Debian's packages"
apt-get update -q
(
    cd packages
    apt-get -q download etcd-server golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev
    apt-get -q source --download-only "kubernetes=$version"
    for package in *.deb; do dpkg-deb -x "$package" "$work/unpacked"; done
)
install unpacked/usr/bin/etcd "$bin/etcd"

export GOROOT=$work/unpacked/usr/lib/go-1.19 GOPATH=$work/gopath GOCACHE=$work/gocache GO111MODULE=off CGO_ENABLED=0
export PATH=$GOROOT/bin:$PATH

source=$GOPATH/src/k8s.io/kubernetes
mkdir -p "$source"
tar -xf packages/kubernetes_*.orig.tar.gz --strip-components=1 -C "$source"
cd "$source"
patch --forward -p1 <"$here/patches/newer-groups-as-crds.patch"

# The reflect2 of 2019 in the source reads maps wrongly under Go 1.18 and later: the server crashes at its first CRD.
reflect2=vendor/github.com/modern-go/reflect2
rm -f $reflect2/*.go $reflect2/*.s
cp -L "$work/unpacked/usr/share/gocode/src/github.com/modern-go/reflect2/"*.{go,s} $reflect2/

echo "generating the OpenAPI code that the source package lacks"
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
folders=$(
    grep -rl --include='*.go' -e '+k8s:openapi-gen=true' pkg staging/src/k8s.io/*/ cmd | xargs -n1 dirname | sort -u |
        grep -v -e testdata -e /test -e apiserver/pkg/apis/example -e metrics |
        sed -e 's#^staging/src/#k8s.io/kubernetes/vendor/#;t' -e 's#^#k8s.io/kubernetes/#' | paste -sd,
)
"$work/openapi-gen" -O zz_generated.openapi -i "$folders" -p k8s.io/kubernetes/pkg/generated/openapi \
    --go-header-file hack/boilerplate/boilerplate.generatego.txt -r "$work/violations.txt"

flags="-s -w"
for package in k8s.io/kubernetes/vendor/k8s.io/component-base/version k8s.io/kubernetes/vendor/k8s.io/client-go/pkg/version; do
    flags+=" -X $package.gitVersion=$claimed -X $package.gitMajor=1 -X $package.gitMinor=29"
done
for program in kube-apiserver kube-controller-manager kube-scheduler; do
    echo "building $program"
    go build -tags providerless -ldflags "$flags" -o "$bin/$program" "./cmd/$program"
done
ls -l "$bin"
